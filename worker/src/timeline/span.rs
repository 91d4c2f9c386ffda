//! One thing that ran, on the clock of its process; and the timeline, which takes such things while it is open.
//!
//! Processes of one machine have one clock. Between machines nothing is assumed but that all of them opened their
//! timelines when they left the same barrier: the first of each machine did so at time 0.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::device::{Compute, DeviceError, Event};

/// Most spans that one timeline takes: some hundred steps of a large model. What comes later is counted.
const MAX_SPANS: usize = 500_000;

/// What follows one after the other: a stream, a communicator, the thread that trains.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// Whole steps.
    Steps,
    /// The thread that trains, where it only tells the device what to do.
    Host,
    /// The stream that computes; on a CPU it is the thread that trains.
    Compute,
    /// Operations of a communicator.
    Communicator(String),
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps => f.write_str("steps"),
            Self::Host => f.write_str("host"),
            Self::Compute => f.write_str("compute"),
            Self::Communicator(name) => write!(f, "{COMMUNICATION}{name}"),
        }
    }
}

const COMMUNICATION: &str = "communication: ";

impl Lane {
    /// The lane that is displayed so.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "steps" => Some(Self::Steps),
            "host" => Some(Self::Host),
            "compute" => Some(Self::Compute),
            _ => Some(Self::Communicator(name.strip_prefix(COMMUNICATION)?.to_owned())),
        }
    }
}

/// The purpose of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A whole step.
    Step,
    /// Tokens for a micro-batch.
    Data,
    /// Forward of a micro-batch, and of each of its blocks.
    Forward,
    /// Backward, likewise.
    Backward,
    /// Norm, clipping and update.
    Optimizer,
    /// One operation of a block.
    Operation,
    /// Nothing: it stands still until what other ranks send has come.
    Wait,
    /// Gradients between ranks.
    Gradients,
    /// Parameters between ranks.
    Parameters,
    /// Activations and their gradients between ranks.
    Activations,
    /// Whatever else goes between ranks: losses, norms.
    Other,
    /// Nothing: another rank has not come yet. Known of merged traces only.
    Late,
}

/// One thing that ran. Times are in microseconds since the timeline was opened.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Its lane.
    pub lane: Lane,
    /// Its purpose.
    pub kind: Kind,
    /// `backward h.3`, `all-reduce (bucket 2)`.
    pub name: Cow<'static, str>,
    /// When it began.
    pub start_us: f64,
    /// When it ended.
    pub end_us: f64,
    /// Set for operations of a communicator.
    pub collective: Option<Collective>,
}

/// Which operation of which communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// Size of its buffer.
    pub bytes: u64,
    /// Global rank of the communicator's first rank.
    pub first_rank: u32,
    /// Number of its ranks.
    pub ranks: u32,
    /// Number of the operation in its communicator, from 0, if it moves nothing before all ranks have come.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sequence: Option<u64>,
}

impl Span {
    /// One whose times are not known yet.
    pub fn of(lane: Lane, kind: Kind, name: impl Into<Cow<'static, str>>) -> Self {
        Self {
            lane,
            kind,
            name: name.into(),
            start_us: 0.0,
            end_us: 0.0,
            collective: None,
        }
    }

    /// How long it took, in microseconds.
    pub fn length_us(&self) -> f64 {
        self.end_us - self.start_us
    }
}

/// One name for each start of a machine, in its containers too.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A moment, by a clock that all processes of a machine share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockReading {
    /// Name of the clock.
    pub clock: String,
    /// What it showed.
    pub ns: i64,
}

impl ClockReading {
    /// Now, by the machine's clock that only goes forward.
    pub fn now() -> Self {
        // The process's own name is one that no other process has: such a timeline begins at its own time 0.
        let clock =
            std::fs::read_to_string(BOOT_ID).unwrap_or_else(|_| format!("process {}", std::process::id()));
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC);
        Self {
            clock: clock.trim().to_owned(),
            ns: now.map_or(0, |now| now.tv_sec() * 1_000_000_000 + now.tv_nsec()),
        }
    }

    /// So much later.
    #[must_use]
    pub fn after(self, passed: Duration) -> Self {
        Self {
            ns: self.ns + passed.as_nanos() as i64,
            ..self
        }
    }

    /// How much later than time 0 of all of them each of these moments was, in microseconds.
    pub fn offsets_us(readings: &[&Self]) -> Vec<f64> {
        let mut first: BTreeMap<&str, i64> = BTreeMap::new();
        for reading in readings {
            let ns = first.entry(&reading.clock).or_insert(reading.ns);
            *ns = reading.ns.min(*ns);
        }
        let offset = |reading: &&Self| (reading.ns - first[reading.clock.as_str()]) as f64 * 1e-3;
        readings.iter().map(offset).collect()
    }
}

/// What spans of one rank belong to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The run and how it trains, for people.
    pub run: String,
    /// Global rank.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Name of its node.
    pub host: String,
    /// Generation of the job.
    pub generation: u64,
    /// First and last step, from 1.
    pub steps: [u64; 2],
    /// When time 0 of its spans was.
    pub clock: ClockReading,
    /// Spans that were left out, for lack of room or of times.
    pub missed: u64,
}

/// Takes spans while it is open. Clones are the same timeline.
#[derive(Clone, Default)]
pub struct Timeline(Arc<Shared>);

#[derive(Default)]
struct Shared {
    is_open: AtomicBool,
    tape: Mutex<Tape>,
}

#[derive(Default)]
struct Tape {
    origin: Option<Origin>,
    /// Spans without their times, which are looked up at the end.
    taken: Vec<(Span, Interval)>,
    missed: u64,
}

/// Time 0.
struct Origin {
    at: Instant,
    clock: ClockReading,
    /// The same moment on a device that runs asynchronously.
    point: Option<Event>,
}

/// When something ran.
#[derive(Clone, Debug)]
pub enum Interval {
    /// Read from the clock of the host.
    Host([Instant; 2]),
    /// Between two points of a stream, which were recorded to be timed.
    Stream([Event; 2]),
}

impl Interval {
    /// How long it was. None if the device has not passed its end, or did not time it.
    pub fn length(&self) -> Option<Duration> {
        match self {
            Self::Host([began, ended]) => Some(ended.saturating_duration_since(*began)),
            Self::Stream([began, ended]) => ended.since(began),
        }
    }
}

/// Where a span began.
pub struct Mark {
    at: Instant,
    point: Option<Event>,
}

/// What a timeline has taken.
#[derive(Debug)]
pub struct Recording {
    /// The spans, unordered.
    pub spans: Vec<Span>,
    /// Spans without room, or without times from the device.
    pub missed: u64,
    /// When time 0 was.
    pub clock: ClockReading,
}

impl Timeline {
    /// Begins to take spans. What is in the stream ends first: `deadline` bounds the wait.
    pub fn open(&self, compute: &Compute, deadline: Instant) -> Result<(), DeviceError> {
        // A reading takes its time: it is taken before, so that nothing is between the device's time 0 and the host's.
        let (clock, read) = (ClockReading::now(), Instant::now());
        let point = point_of(compute);
        if let Some(point) = &point {
            point.wait(deadline)?;
        }
        let at = Instant::now();
        *self.0.tape.lock() = Tape {
            origin: Some(Origin {
                at,
                clock: clock.after(at - read),
                point,
            }),
            ..Tape::default()
        };
        self.0.is_open.store(true, Ordering::Release);
        Ok(())
    }

    /// Takes nothing until [`Timeline::resume`].
    pub fn pause(&self) {
        self.0.is_open.store(false, Ordering::Release);
    }

    /// Takes spans again, if it was opened and not closed since.
    pub fn resume(&self) {
        let is_begun = self.0.tape.lock().origin.is_some();
        self.0.is_open.store(is_begun, Ordering::Release);
    }

    /// Takes no more. All that was begun must have ended, on the device too. None if it was not open.
    #[must_use]
    pub fn close(&self) -> Option<Recording> {
        self.0.is_open.store(false, Ordering::Release);
        let Tape {
            origin,
            taken,
            mut missed,
        } = std::mem::take(&mut *self.0.tape.lock());
        let origin = origin?;
        let mut spans = Vec::with_capacity(taken.len());
        for (span, interval) in taken {
            match origin.place(&interval) {
                Some([start_us, end_us]) => spans.push(Span {
                    start_us,
                    end_us,
                    ..span
                }),
                None => missed += 1,
            }
        }
        Some(Recording {
            spans,
            missed,
            clock: origin.clock,
        })
    }

    /// True while it takes spans.
    pub fn is_open(&self) -> bool {
        self.0.is_open.load(Ordering::Acquire)
    }

    /// A span begins at the end of the stream. None while the timeline is closed.
    pub fn mark(&self, compute: &Compute) -> Option<Mark> {
        self.is_open().then(|| Mark {
            at: Instant::now(),
            point: point_of(compute),
        })
    }

    /// It ends at what is the end of the stream now. Where the device runs asynchronously, the host has a span too, of the
    /// time that it took to tell the device; but for operations, which are many.
    pub fn end(&self, began: Mark, compute: &Compute, kind: Kind, name: impl Into<Cow<'static, str>>) {
        let (name, on_host) = (name.into(), Interval::Host([began.at, Instant::now()]));
        let lane = match kind {
            Kind::Step => Lane::Steps,
            _ => Lane::Compute,
        };
        let points = began.point.zip(point_of(compute));
        let Some((begin, end)) = points else {
            return self.record(Span::of(lane, kind, name), on_host);
        };
        if !matches!(kind, Kind::Operation | Kind::Step) {
            self.record(Span::of(Lane::Host, kind, name.clone()), on_host);
        }
        self.record(Span::of(lane, kind, name), Interval::Stream([begin, end]));
    }

    /// It ran in this interval.
    pub fn record(&self, span: Span, interval: Interval) {
        if !self.is_open() {
            return;
        }
        let mut tape = self.0.tape.lock();
        if tape.taken.len() == MAX_SPANS {
            tape.missed += 1;
            return;
        }
        tape.taken.push((span, interval));
    }
}

/// The end of the stream, on a device that runs asynchronously.
fn point_of(Compute { device, stream }: &Compute) -> Option<Event> {
    device.is_asynchronous().then(|| device.record_timed(*stream))
}

impl Origin {
    /// Begin and end in microseconds, if they are known.
    fn place(&self, interval: &Interval) -> Option<[f64; 2]> {
        match interval {
            Interval::Host(times) => Some(times.map(|at| {
                let since = at.saturating_duration_since(self.at);
                since.as_secs_f64() * 1e6
            })),
            Interval::Stream([begin, end]) => {
                // Both by the same point: devices measure long times less exactly than short ones, and what follows
                // each other, or is within each other, must stay so.
                let zero = self.point.as_ref()?;
                let us = |point: &Event| Some(point.since(zero)?.as_secs_f64() * 1e6);
                Some([us(begin)?, us(end)?])
            }
        }
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::device::{CpuDevice, EventState};

    #[test]
    fn the_first_of_each_machine_begins_at_zero() {
        let reading = |clock: &str, ns| ClockReading {
            clock: clock.into(),
            ns,
        };
        let all = [reading("a", 5_000), reading("b", 900), reading("a", 2_000)];
        assert_eq!(ClockReading::offsets_us(&all.each_ref()), [3.0, 0.0, 0.0]);
        let (one, other) = (ClockReading::now(), ClockReading::now());
        assert_eq!(one.clone().after(Duration::from_micros(3)).ns, one.ns + 3_000);
        assert!(one.clock == other.clock && one.ns > 0 && one.ns <= other.ns);
    }

    /// So many nanoseconds after time 0. Times between two such are told as CUDA does: in milliseconds, of 32 bits.
    struct At(u64);

    impl EventState for At {
        fn poll(&self) -> Option<Result<(), DeviceError>> {
            Some(Ok(()))
        }

        fn wait(&self, _deadline: Instant) -> Result<(), DeviceError> {
            Ok(())
        }

        fn since(&self, earlier: &Event) -> Option<Duration> {
            let At(earlier) = earlier.state_as()?;
            let ms = (self.0 - earlier) as f64 * 1e-6;
            Some(Duration::from_secs_f64(f64::from(ms as f32) * 1e-3))
        }
    }

    #[test]
    fn what_follows_each_other_on_a_device_does_not_overlap_after_a_while() {
        let origin = Origin {
            at: Instant::now(),
            clock: ClockReading::now(),
            point: Some(Event::new(At(0))),
        };
        let place = |times: [u64; 2]| {
            let points = times.map(|ns| Event::new(At(ns)));
            origin.place(&Interval::Stream(points)).unwrap()
        };
        // Some 20 s after time 0, operations of 3 µs.
        for begin in (20_000_000_000..20_000_300_000_u64).step_by(3001) {
            let (one, next) = (place([begin, begin + 3001]), place([begin + 3001, begin + 6002]));
            let both = place([begin, begin + 6002]);
            assert!(
                one[0] <= one[1] && one[1] <= next[0] && next[1] <= both[1],
                "{one:?} {next:?} {both:?}"
            );
        }
    }

    #[test]
    fn spans_are_taken_while_it_is_open() {
        let compute = Compute::new(Arc::new(CpuDevice::new(1).unwrap()));
        let timeline = Timeline::default();
        assert!(timeline.mark(&compute).is_none());
        assert!(timeline.close().is_none());
        timeline.open(&compute, Instant::now()).unwrap();
        let before = Instant::now();
        let mark = timeline.mark(&compute).unwrap();
        timeline.end(mark, &compute, Kind::Forward, "forward");
        let late = timeline.mark(&compute).unwrap();
        let times = [before, before + Duration::from_millis(5)];
        let collective = Collective {
            bytes: 4096,
            first_rank: 0,
            ranks: 2,
            sequence: Some(0),
        };
        timeline.record(
            Span {
                collective: Some(collective.clone()),
                ..Span::of(Lane::Communicator("world".into()), Kind::Gradients, "all-reduce")
            },
            Interval::Host(times),
        );
        let recording = timeline.close().unwrap();
        timeline.end(late, &compute, Kind::Backward, "too late");
        assert_eq!((recording.spans.len(), recording.missed), (2, 0));
        let [forward, reduce] = &recording.spans[..] else {
            panic!()
        };
        assert_eq!((&forward.lane, forward.kind), (&Lane::Compute, Kind::Forward));
        assert!(forward.start_us >= 0.0 && forward.end_us >= forward.start_us);
        assert!((reduce.length_us() - 5000.0).abs() < 1e-6 && reduce.collective == Some(collective));
        timeline.resume();
        assert!(!timeline.is_open());
        // The next one begins anew, and takes nothing while it is held.
        timeline.open(&compute, Instant::now()).unwrap();
        timeline.pause();
        assert!(timeline.mark(&compute).is_none());
        timeline.record(
            Span::of(Lane::Compute, Kind::Wait, "waits"),
            Interval::Host(times),
        );
        timeline.resume();
        assert!(timeline.is_open());
        assert_eq!(timeline.close().unwrap().spans, []);
    }

    #[test]
    fn what_the_device_cannot_time_is_counted() {
        let compute = Compute::new(Arc::new(CpuDevice::new(1).unwrap()));
        let timeline = Timeline::default();
        timeline.open(&compute, Instant::now()).unwrap();
        let points = [Event::reached(), Event::reached()];
        timeline.record(
            Span::of(Lane::Compute, Kind::Wait, "waits"),
            Interval::Stream(points),
        );
        let recording = timeline.close().unwrap();
        assert_eq!((recording.spans.len(), recording.missed), (0, 1));
    }
}
