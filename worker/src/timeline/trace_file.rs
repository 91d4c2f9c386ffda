//! Spans in the Trace Event Format (Google, "Trace Event Format", JSON object form), which Perfetto and Chrome show.
//!
//! A rank is a process of the trace, a lane one of its threads. `otherData` says what Perfetto need not know, so that
//! files of several ranks can be read again and become one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::overlap::mark_late;
use super::{About, ClockReading, Collective, Kind, Lane, Span};

/// Numbers of the lanes of one rank begin at a multiple of it: viewers take the number of a thread for unique.
const LANES: u64 = 100;

/// Spans of some ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceFile {
    /// What is known of each rank, and its spans, in order of rank.
    pub ranks: Vec<(About, Vec<Span>)>,
}

/// A file that is no such trace.
#[derive(Debug, thiserror::Error)]
#[error("not a timeline of ddp-run: {0}")]
pub struct TraceFileError(#[from] serde_json::Error);

#[derive(Serialize, Deserialize)]
struct Document {
    #[serde(rename = "displayTimeUnit")]
    unit: String,
    #[serde(rename = "otherData")]
    other: Other,
    #[serde(rename = "traceEvents")]
    events: Vec<TraceEvent>,
}

#[derive(Serialize, Deserialize)]
struct Other {
    ranks: Vec<About>,
}

#[derive(Default, Serialize, Deserialize)]
struct TraceEvent {
    name: String,
    ph: char,
    pid: u64,
    tid: u64,
    #[serde(rename = "cat", skip_serializing_if = "Option::is_none")]
    kind: Option<Kind>,
    /// Microseconds, as `dur`.
    #[serde(rename = "ts", skip_serializing_if = "Option::is_none")]
    start: Option<f64>,
    #[serde(rename = "dur", skip_serializing_if = "Option::is_none")]
    length: Option<f64>,
    #[serde(default, skip_serializing_if = "Args::is_empty")]
    args: Args,
}

/// Phase of a span.
const COMPLETE: char = 'X';

/// Phase of what a process or a thread is called.
const METADATA: char = 'M';

#[derive(Default, PartialEq, Serialize, Deserialize)]
struct Args {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sort_index: Option<u64>,
    #[serde(flatten)]
    collective: Option<Collective>,
}

impl Args {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl TraceFile {
    /// The file of one rank.
    pub fn of_rank(about: About, mut spans: Vec<Span>) -> Self {
        sort(&mut spans);
        Self {
            ranks: vec![(about, spans)],
        }
    }

    /// Merges the ranks of several files on one clock, and marks which ranks waited for which.
    pub fn merged(files: Vec<Self>) -> Self {
        let mut ranks: Vec<_> = files.into_iter().flat_map(|file| file.ranks).collect();
        ranks.sort_by_key(|(about, _)| about.rank);
        let readings: Vec<&ClockReading> = ranks.iter().map(|(about, _)| &about.clock).collect();
        let offsets = ClockReading::offsets_us(&readings);
        for ((about, spans), offset) in ranks.iter_mut().zip(offsets) {
            for span in spans {
                span.start_us += offset;
                span.end_us += offset;
            }
            about.clock.ns -= (offset * 1e3) as i64;
        }
        mark_late(&mut ranks);
        for (_, spans) in &mut ranks {
            sort(spans);
        }
        Self { ranks }
    }

    /// The content of the file.
    pub fn to_json(&self) -> Vec<u8> {
        let events = self.ranks.iter().flat_map(|(about, spans)| events(about, spans));
        let document = Document {
            unit: "ms".into(),
            other: Other {
                ranks: self.ranks.iter().map(|(about, _)| about.clone()).collect(),
            },
            events: events.collect(),
        };
        serde_json::to_vec(&document).expect("numbers and names serialise")
    }

    /// Parses the content of a file.
    pub fn parse(json: &[u8]) -> Result<Self, TraceFileError> {
        let document: Document = serde_json::from_slice(json)?;
        let mut lanes: BTreeMap<u64, Lane> = BTreeMap::new();
        for event in &document.events {
            if let (METADATA, "thread_name", Some(name)) = (event.ph, event.name.as_str(), &event.args.name)
                && let Some(lane) = Lane::named(name)
            {
                lanes.insert(event.tid, lane);
            }
        }
        let mut spans: BTreeMap<u64, Vec<Span>> = BTreeMap::new();
        for event in document.events {
            let (Some(kind), Some(start_us), Some(length)) = (event.kind, event.start, event.length) else {
                continue;
            };
            let Some(lane) = lanes.get(&event.tid) else {
                continue;
            };
            spans.entry(event.pid).or_default().push(Span {
                lane: lane.clone(),
                kind,
                name: event.name.into(),
                start_us,
                end_us: start_us + length,
                collective: event.args.collective,
            });
        }
        let of_rank = |about: About| {
            let spans = spans.remove(&process(&about)).unwrap_or_default();
            (about, spans)
        };
        Ok(Self {
            ranks: document.other.ranks.into_iter().map(of_rank).collect(),
        })
    }
}

/// By time; what begins together and ends later is around the other.
fn sort(spans: &mut [Span]) {
    spans.sort_by(|a, b| (a.start_us.total_cmp(&b.start_us)).then(b.end_us.total_cmp(&a.end_us)));
}

/// Number of a rank's process. Viewers take process 0 for the system's.
fn process(about: &About) -> u64 {
    u64::from(about.rank) + 1
}

fn events(about: &About, spans: &[Span]) -> Vec<TraceEvent> {
    let pid = process(about);
    let mut lanes: Vec<&Lane> = spans.iter().map(|span| &span.lane).collect();
    lanes.sort_unstable();
    lanes.dedup();
    let tid = |lane: usize| pid * LANES + lane as u64;
    let mut events = Vec::with_capacity(2 + 2 * lanes.len() + spans.len());
    // What a process or a thread is called, and where it stands.
    let mut describe = |what: &str, tid: u64, name: String, index: u64| {
        let (mut named, mut sorted) = (Args::default(), Args::default());
        (named.name, sorted.sort_index) = (Some(name), Some(index));
        let metadata = [("name", named), ("sort_index", sorted)].map(|(which, args)| TraceEvent {
            name: format!("{what}_{which}"),
            ph: METADATA,
            pid,
            tid,
            args,
            ..TraceEvent::default()
        });
        events.extend(metadata);
    };
    let title = format!("rank {} of {} ({})", about.rank, about.world_size, about.host);
    describe("process", tid(0), title, u64::from(about.rank));
    for (index, lane) in lanes.iter().enumerate() {
        describe("thread", tid(index), lane.to_string(), index as u64);
    }
    events.extend(spans.iter().map(|span| TraceEvent {
        name: span.name.clone().into_owned(),
        ph: COMPLETE,
        pid,
        tid: tid(lanes.binary_search(&&span.lane).expect("collected above")),
        kind: Some(span.kind),
        start: Some(to_ns(span.start_us)),
        length: Some(to_ns(span.length_us())),
        args: Args {
            collective: span.collective.clone(),
            ..Args::default()
        },
    }));
    events
}

/// Microseconds without the digits below nanoseconds.
fn to_ns(us: f64) -> f64 {
    (us * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(rank: u32, clock: &str, ns: i64) -> About {
        About {
            run: "test".into(),
            rank,
            world_size: 2,
            host: "node-a".into(),
            generation: 0,
            steps: [3, 4],
            clock: ClockReading {
                clock: clock.into(),
                ns,
            },
            missed: 0,
        }
    }

    fn spans() -> Vec<Span> {
        let span = |lane: Lane, kind, name: &'static str, start_us, end_us, collective| Span {
            lane,
            kind,
            name: name.into(),
            start_us,
            end_us,
            collective,
        };
        let comm = Lane::Communicator("world".into());
        let reduce = Collective {
            bytes: 4096,
            first_rank: 0,
            ranks: 2,
            sequence: Some(5),
        };
        vec![
            span(Lane::Compute, Kind::Backward, "backward h.0", 1.0, 4.5, None),
            span(Lane::Steps, Kind::Step, "step 3", 0.0, 9.0, None),
            span(
                comm,
                Kind::Gradients,
                "all-reduce (bucket 0)",
                2.0,
                3.0,
                Some(reduce),
            ),
            span(Lane::Compute, Kind::Backward, "backward", 1.0, 8.0, None),
        ]
    }

    #[test]
    fn a_rank_reads_as_it_was_written() {
        let about = About {
            missed: 7,
            ..about(1, "a", 5)
        };
        let file = TraceFile::of_rank(about, spans());
        let read = TraceFile::parse(&file.to_json()).unwrap();
        assert_eq!(read, file);
        let (about, spans) = &read.ranks[0];
        assert_eq!((about.missed, about.clock.ns), (7, 5));
        // Around before inside.
        let names: Vec<_> = spans.iter().map(|span| span.name.as_ref()).collect();
        assert_eq!(
            names,
            ["step 3", "backward", "backward h.0", "all-reduce (bucket 0)"]
        );
        assert!(TraceFile::parse(b"{}").is_err());
    }

    #[test]
    fn it_is_what_viewers_read() {
        let file = TraceFile {
            ranks: vec![(about(0, "a", 0), spans())],
        };
        let json: serde_json::Value = serde_json::from_slice(&file.to_json()).unwrap();
        insta::assert_snapshot!(
            serde_json::to_string(&json["traceEvents"][0]).unwrap(),
            @r#"{"args":{"name":"rank 0 of 2 (node-a)"},"name":"process_name","ph":"M","pid":1,"tid":100}"#
        );
        let reduce = json["traceEvents"].as_array().unwrap();
        let reduce = reduce.iter().find(|event| event["cat"] == "gradients").unwrap();
        insta::assert_snapshot!(
            serde_json::to_string(reduce).unwrap(),
            @r#"{"args":{"bytes":4096,"first_rank":0,"ranks":2,"sequence":5},"cat":"gradients","dur":1.0,"name":"all-reduce (bucket 0)","ph":"X","pid":1,"tid":102,"ts":2.0}"#
        );
    }

    #[test]
    fn ranks_of_one_machine_have_one_clock() {
        let one = |rank, clock, ns| TraceFile {
            ranks: vec![(about(rank, clock, ns), spans())],
        };
        let merged = TraceFile::merged(vec![one(2, "b", 77), one(1, "a", 4_000), one(0, "a", 1_000)]);
        let begins: Vec<(u32, f64)> = merged
            .ranks
            .iter()
            .map(|(about, spans)| (about.rank, spans[0].start_us))
            .collect();
        assert_eq!(begins, [(0, 0.0), (1, 3.0), (2, 0.0)]);
    }
}
