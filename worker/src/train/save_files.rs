//! The files that a rank writes for a checkpoint, and the copy of what goes into them.

use super::owned::{self, Part};
use super::save_thread::{SaveFile, Source};
use super::saving::Here;
use crate::checkpoint::{Extent, file_stem};
use crate::device::{Arena, Buffer, DeviceError};

/// A file that this rank writes, and where the state is that goes into it.
pub(super) struct File {
    stem: String,
    pub(super) extents: Vec<Extent>,
    pub(super) buffers: Vec<Buffer>,
}

impl File {
    pub(super) fn with((file, source): (Self, Source)) -> SaveFile {
        SaveFile {
            stem: file.stem,
            extents: file.extents,
            source,
        }
    }
}

/// One for each kind of tensor.
pub(super) fn files(here: Here<'_>) -> Vec<File> {
    let (rank, ranks) = (here.world.rank(), here.world.size());
    let weights = &here.replica.weights;
    let own = owned::written_by(weights.sharding(), rank, ranks);
    let params = &here.replica.model.params;
    let file = |part: &Part<'_>| File {
        stem: file_stem(part.kind, rank, ranks),
        extents: own
            .iter()
            .map(|piece| owned::extent(part.kind, piece, params))
            .collect(),
        buffers: own.iter().map(|piece| part.portion.slice(&piece.place)).collect(),
    };
    owned::parts(weights.own(), here.adamw).iter().map(file).collect()
}

/// Names of the files of all ranks.
pub(super) fn stems(ranks: usize) -> Vec<String> {
    let of = |rank| crate::checkpoint::Kind::ALL.map(|kind| file_stem(kind, rank, ranks));
    (0..ranks).flat_map(of).collect()
}

/// The state as it is now, in the memory set aside.
pub(super) fn copy(here: Here<'_>, files: &[File], snapshot: &Arena) -> Result<Vec<Source>, DeviceError> {
    let (device, stream) = (here.adamw.device(), &here.world.stream);
    let mut end = 0;
    let mut copied = |buffer: &Buffer| -> Result<Buffer, DeviceError> {
        let target = snapshot.slice(end..end + buffer.bytes());
        end += buffer.bytes();
        device.download_to(*stream, buffer, &mut target.host_bytes_mut()?)?;
        Ok(target)
    };
    files
        .iter()
        .map(|file| {
            let buffers: Result<Vec<Buffer>, _> = file.buffers.iter().map(&mut copied).collect();
            buffers.map(Source::Snapshot)
        })
        .collect()
}
