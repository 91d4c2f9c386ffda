//! Takes spans while it is open.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{ClockReading, Collective, Kind, Lane, Span};
use crate::device::{Device, DeviceError, Event, Stream};

/// Most spans that one timeline takes: some hundred steps of a large model. What comes later is counted.
const MAX_SPANS: usize = 500_000;

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
    taken: Vec<Taken>,
    missed: u64,
}

/// Time 0.
struct Origin {
    at: Instant,
    clock: ClockReading,
    /// The same moment on a device that runs asynchronously.
    point: Option<Event>,
}

struct Taken {
    lane: Lane,
    kind: Kind,
    name: Cow<'static, str>,
    collective: Option<Collective>,
    ran: Ran,
}

/// When something ran.
enum Ran {
    Host([Instant; 2]),
    Stream([Event; 2]),
}

/// Where a span began.
pub struct Mark {
    at: Instant,
    point: Option<Event>,
}

/// What a timeline has taken.
#[derive(Debug)]
pub struct Recording {
    /// In no order.
    pub spans: Vec<Span>,
    /// Spans for which there was no room, or whose times the device did not tell.
    pub missed: u64,
    /// When time 0 was.
    pub clock: ClockReading,
}

impl Timeline {
    /// Begins to take spans. What is in `stream` ends first: `deadline` bounds the wait.
    pub fn open(&self, device: &dyn Device, stream: Stream, deadline: Instant) -> Result<(), DeviceError> {
        // A reading takes its time: it is taken before, so that nothing is between the device's time 0 and the host's.
        let (clock, read) = (ClockReading::now(), Instant::now());
        let point = device.is_asynchronous().then(|| device.record_timed(stream));
        if let Some(point) = &point {
            point.wait(deadline)?;
        }
        let at = Instant::now();
        *self.tape() = Tape {
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
        let is_begun = self.tape().origin.is_some();
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
        } = std::mem::take(&mut *self.tape());
        let origin = origin?;
        let mut spans = Vec::with_capacity(taken.len());
        for taken in taken {
            match origin.place(&taken.ran) {
                Some([start_us, end_us]) => spans.push(Span {
                    lane: taken.lane,
                    kind: taken.kind,
                    name: taken.name,
                    start_us,
                    end_us,
                    collective: taken.collective,
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
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.is_open.load(Ordering::Acquire)
    }

    /// A span begins at the end of `stream`. None while the timeline is closed.
    #[must_use]
    pub fn mark(&self, device: &dyn Device, stream: Stream) -> Option<Mark> {
        self.is_open().then(|| Mark {
            at: Instant::now(),
            point: device.is_asynchronous().then(|| device.record_timed(stream)),
        })
    }

    /// It ends at what is the end of `stream` now. Where the device runs asynchronously, the host has a span too, of the
    /// time that it took to tell the device; but for operations, which are many.
    pub fn end(
        &self,
        began: Mark,
        (device, stream): (&dyn Device, Stream),
        kind: Kind,
        name: impl Into<Cow<'static, str>>,
    ) {
        let (name, ended) = (name.into(), Instant::now());
        let (at, lane) = (began.at, lane_of(kind));
        let Some(begin) = began.point else {
            return self.took(lane, kind, name, [at, ended]);
        };
        if !matches!(kind, Kind::Operation | Kind::Step) {
            self.took(Lane::Host, kind, name.clone(), [at, ended]);
        }
        self.passed(lane, kind, name, [begin, device.record_timed(stream)]);
    }

    /// The host was at it for so long.
    pub fn took(
        &self,
        lane: Lane,
        kind: Kind,
        name: impl Into<Cow<'static, str>>,
        [began, ended]: [Instant; 2],
    ) {
        self.take(lane, kind, name.into(), None, Ran::Host([began, ended]));
    }

    /// A stream was at it between two points, which were recorded to be timed.
    pub fn passed(&self, lane: Lane, kind: Kind, name: impl Into<Cow<'static, str>>, points: [Event; 2]) {
        self.take(lane, kind, name.into(), None, Ran::Stream(points));
    }

    /// As [`Timeline::took`], for an operation of a communicator.
    pub fn moved(&self, lane: Lane, kind: Kind, name: String, what: Collective, times: [Instant; 2]) {
        self.take(lane, kind, name.into(), Some(what), Ran::Host(times));
    }

    /// As [`Timeline::passed`], for an operation of a communicator.
    pub fn moved_in_stream(
        &self,
        lane: Lane,
        kind: Kind,
        name: String,
        what: Collective,
        points: [Event; 2],
    ) {
        self.take(lane, kind, name.into(), Some(what), Ran::Stream(points));
    }

    fn take(
        &self,
        lane: Lane,
        kind: Kind,
        name: Cow<'static, str>,
        collective: Option<Collective>,
        ran: Ran,
    ) {
        if !self.is_open() {
            return;
        }
        let mut tape = self.tape();
        if tape.taken.len() == MAX_SPANS {
            tape.missed += 1;
            return;
        }
        tape.taken.push(Taken {
            lane,
            kind,
            name,
            collective,
            ran,
        });
    }

    fn tape(&self) -> MutexGuard<'_, Tape> {
        self.0.tape.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Origin {
    /// Begin and end in microseconds, if they are known.
    fn place(&self, ran: &Ran) -> Option<[f64; 2]> {
        match ran {
            Ran::Host(times) => Some(times.map(|at| {
                let since = at.saturating_duration_since(self.at);
                since.as_secs_f64() * 1e6
            })),
            Ran::Stream([begin, end]) => {
                // Both by the same point: devices measure long times less exactly than short ones, and what follows
                // each other, or is within each other, must stay so.
                let zero = self.point.as_ref()?;
                let us = |point: &Event| Some(point.since(zero)?.as_secs_f64() * 1e6);
                Some([us(begin)?, us(end)?])
            }
        }
    }
}

fn lane_of(kind: Kind) -> Lane {
    match kind {
        Kind::Step => Lane::Steps,
        _ => Lane::Compute,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::device::{CpuDevice, EventState};

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
            origin.place(&Ran::Stream(points)).unwrap()
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
        let device = CpuDevice::new(1).unwrap();
        let stream = device.stream();
        let timeline = Timeline::default();
        let on = (&device as &dyn Device, stream);
        assert!(timeline.mark(&device, stream).is_none());
        assert!(timeline.close().is_none());
        timeline.open(&device, stream, Instant::now()).unwrap();
        let before = Instant::now();
        let mark = timeline.mark(&device, stream).unwrap();
        timeline.end(mark, on, Kind::Forward, "forward");
        let late = timeline.mark(&device, stream).unwrap();
        let times = [before, before + Duration::from_millis(5)];
        let collective = Collective {
            bytes: 4096,
            first_rank: 0,
            ranks: 2,
            sequence: Some(0),
        };
        timeline.moved(
            Lane::Communicator("world".into()),
            Kind::Gradients,
            "all-reduce".into(),
            collective.clone(),
            times,
        );
        let recording = timeline.close().unwrap();
        timeline.end(late, on, Kind::Backward, "too late");
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
        timeline.open(&device, stream, Instant::now()).unwrap();
        timeline.pause();
        assert!(timeline.mark(&device, stream).is_none());
        timeline.took(Lane::Compute, Kind::Wait, "waits", times);
        timeline.resume();
        assert!(timeline.is_open());
        assert_eq!(timeline.close().unwrap().spans, []);
    }

    #[test]
    fn what_the_device_cannot_time_is_counted() {
        let device = CpuDevice::new(1).unwrap();
        let timeline = Timeline::default();
        timeline.open(&device, device.stream(), Instant::now()).unwrap();
        let points = [Event::reached(), Event::reached()];
        timeline.passed(Lane::Compute, Kind::Wait, "waits", points);
        let recording = timeline.close().unwrap();
        assert_eq!((recording.spans.len(), recording.missed), (0, 1));
    }
}
