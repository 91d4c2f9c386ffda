//! Event files for TensorBoard: scalars by step, in the folder `tensorboard` of a run.
//!
//! Each life of a run writes a file of its own, whose name sorts after those of the lives before. It begins with a
//! `SessionLog` of `START` and the first step that is to come: of the files before it, TensorBoard drops that step and
//! later ones, as `metrics.jsonl` is cut back after a rollback. A record is the framing of TFRecord around an `Event`
//! (`tensorboard/compat/proto/event.proto`).

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;

use super::reports::MetricsLine;
use super::run_file::{RunFilesError, delete_file};

const FOLDER: &str = "tensorboard";
/// Seconds follow, as TensorBoard's own writers have them: it reads the files of a folder in the order of their names.
const PREFIX: &str = "events.out.tfevents.";
/// From this version on a `SessionLog` drops steps.
const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`
const START: i32 = 1;

/// CRC-32C (Castagnoli).
const CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI);

/// The file of this life. Only rank 0 has one.
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Begins a file in the folder of a run of which `step` steps are finished.
    pub fn create(out_dir: &Path, step: u64) -> Result<Self, RunFilesError> {
        let folder = out_dir.join(FOLDER);
        let create = || -> io::Result<(PathBuf, File)> {
            fs::create_dir_all(&folder)?;
            let last = event_files(&folder)?
                .iter()
                .filter_map(|path| seconds_of(path))
                .max();
            let seconds = (wall_time() as u64).max(last.map_or(0, |last| last + 1));
            let path = folder.join(format!("{PREFIX}{seconds:010}.ddp-run"));
            Ok((path.clone(), File::create_new(&path)?))
        };
        let (path, file) = create().map_err(|e| RunFilesError::io("create a file in", &folder, &e))?;
        let mut events = Self { path, file };
        events.write(0, What::FileVersion(FILE_VERSION.to_owned()))?;
        events.write(step + 1, What::SessionLog(SessionLog { status: START }))?;
        Ok(events)
    }

    /// Appends the scalars of a step.
    pub fn append(&mut self, line: &MetricsLine) -> Result<(), RunFilesError> {
        let scalars = [
            ("loss", Some(line.loss)),
            ("val_loss", line.val_loss),
            ("lr", Some(line.lr)),
            ("grad_norm", Some(line.grad_norm)),
            ("tokens_per_s", Some(line.tokens_per_s)),
            ("mfu", line.achieved.mfu),
            ("expert_load", line.experts.map(|experts| experts.expert_load)),
        ];
        let scalars = scalars.into_iter().filter_map(|(tag, value)| {
            Some(Scalar {
                tag: tag.to_owned(),
                simple_value: Some(value? as f32),
            })
        });
        let value = scalars.collect();
        self.write(line.step, What::Summary(Summary { value }))
    }

    fn write(&mut self, step: u64, what: What) -> Result<(), RunFilesError> {
        let event = Event {
            wall_time: wall_time(),
            step: step as i64,
            what: Some(what),
        };
        let written = self.file.write_all(&record(&event.encode_to_vec()));
        written.map_err(|e| RunFilesError::io("append to", &self.path, &e))
    }

    /// Deletes what runs have written in this folder, and `tensorboard` if nothing else is in it.
    pub(super) fn delete_all(out_dir: &Path) -> Result<(), RunFilesError> {
        let folder = out_dir.join(FOLDER);
        let files = match event_files(&folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            files => files.map_err(|e| RunFilesError::io("read", &folder, &e))?,
        };
        for path in files.iter().filter(|path| seconds_of(path).is_some()) {
            delete_file(path)?;
        }
        // Not empty: somebody else's files stay.
        let _ = fs::remove_dir(folder);
        Ok(())
    }
}

fn event_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect()
}

/// The seconds in the name of a file of events.
fn seconds_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    name.split('.').next()?.parse().ok()
}

fn wall_time() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |time| time.as_secs_f64())
}

/// The framing of TFRecord: length, its checksum, the data, their checksum.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let masked = |bytes: &[u8]| {
        CRC.checksum(bytes)
            .rotate_right(15)
            .wrapping_add(0xa282_ead8)
            .to_le_bytes()
    };
    [&length[..], &masked(&length), data, &masked(data)].concat()
}

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

/// `Summary.Value`
#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// One of several kinds of values: 0 has to be written too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4: 32 bytes of zeros, of ones, and ascending ones.
        assert_eq!(CRC.checksum(&[0; 32]), 0x8a91_36aa);
        assert_eq!(CRC.checksum(&[0xff; 32]), 0x62a8_ab43);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(CRC.checksum(&ascending), 0x46dd_794e);
    }

    /// The first record of a file, made by another implementation.
    const RECORD: &[u8] = b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK\x22\x09\x00\x00\x00\xc0\x0bZ\xd6A\x1a\x0dbrain.Event:2L\xa9\xa4d";

    #[test]
    fn a_record_has_the_bytes_of_tensorflows() {
        let event = Event {
            wall_time: 1.5e9,
            step: 0,
            what: Some(What::FileVersion(FILE_VERSION.to_owned())),
        };
        assert_eq!(record(&event.encode_to_vec()), RECORD);
    }

    /// Lengths and payloads of the records of a file, whose checksums are not looked at.
    fn events(path: &Path) -> Vec<Event> {
        let bytes = fs::read(path).unwrap();
        let (mut rest, mut events) = (&bytes[..], Vec::new());
        while let Some((length, after)) = rest.split_first_chunk::<8>() {
            let length = u64::from_le_bytes(*length) as usize;
            events.push(Event::decode(&after[4..4 + length]).unwrap());
            rest = &after[length + 8..];
        }
        events
    }

    #[test]
    fn each_life_has_a_file_that_drops_the_steps_that_are_trained_again() {
        let run = tempfile::tempdir().unwrap();
        let line = |step| MetricsLine {
            step,
            loss: 2.5,
            val_loss: (step == 2).then_some(3.5),
            ..MetricsLine::default()
        };
        for (done, step) in [(0, 1), (1, 2)] {
            let mut events = EventFile::create(run.path(), done).unwrap();
            events.append(&line(step)).unwrap();
        }
        let mut files = event_files(&run.path().join(FOLDER)).unwrap();
        files.sort();
        assert_eq!(files.len(), 2);
        for (path, step) in files.iter().zip([1, 2]) {
            let [version, start, scalars] = &events(path)[..] else {
                panic!("three records");
            };
            assert_eq!(version.what, Some(What::FileVersion("brain.Event:2".into())));
            let log = SessionLog { status: START };
            assert_eq!((start.step, &start.what), (step, &Some(What::SessionLog(log))));
            let Some(What::Summary(summary)) = &scalars.what else {
                panic!("scalars");
            };
            let tags: Vec<&str> = summary.value.iter().map(|value| value.tag.as_str()).collect();
            let expected = ["loss", "val_loss", "lr", "grad_norm", "tokens_per_s"];
            let expected: Vec<&str> = (expected.into_iter())
                .filter(|tag| step == 2 || *tag != "val_loss")
                .collect();
            assert_eq!((scalars.step, tags), (step, expected));
            let lr = summary.value.iter().find(|value| value.tag == "lr").unwrap();
            assert_eq!(lr.simple_value, Some(0.0), "as at the end of a schedule");
        }
        fs::write(run.path().join("tensorboard/mine"), "").unwrap();
        EventFile::delete_all(run.path()).unwrap();
        let left = event_files(&run.path().join(FOLDER)).unwrap();
        assert_eq!(left, [run.path().join("tensorboard/mine")]);
    }

    #[test]
    fn a_file_in_the_way_is_named() {
        let run = tempfile::tempdir().unwrap();
        fs::write(run.path().join(FOLDER), "").unwrap();
        let error = EventFile::create(run.path(), 0).err().unwrap();
        assert!(error.to_string().contains("tensorboard"), "{error}");
    }
}
