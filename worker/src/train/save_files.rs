//! The files that a rank writes for a checkpoint, and the copy of what goes into them.

use super::owned::{self, OwnExtent, Part};
use super::save_thread::{SaveFile, Source};
use super::saving::Here;
use crate::checkpoint::{Extent, file_stem};
use crate::device::{Arena, Buffer, DeviceError};

/// A file that this rank writes, and where the state is that goes into it.
pub(super) struct File {
    stem: String,
    pub(super) extents: Vec<Extent>,
    /// The elements of each extent, in order.
    pub(super) buffers: Vec<Vec<Buffer>>,
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
    let file = |part: &Part<'_>| {
        let extents = own
            .iter()
            .flat_map(|piece| owned::extents(&part.kind, piece, params));
        let placed = extents.map(|OwnExtent { extent, places }| {
            let buffers = places.iter().map(|place| part.portion.slice(place)).collect();
            (extent, buffers)
        });
        let (extents, buffers) = placed.unzip();
        File {
            stem: file_stem(&part.kind, rank, ranks),
            extents,
            buffers,
        }
    };
    owned::parts(weights.own(), here.optimizer)
        .iter()
        .map(file)
        .collect()
}

/// Names of the files of all ranks.
pub(super) fn stems(here: Here<'_>) -> Vec<String> {
    let ranks = here.world.size();
    let parts = owned::parts(here.replica.weights.own(), here.optimizer);
    let of = |rank| parts.iter().map(move |part| file_stem(&part.kind, rank, ranks));
    (0..ranks).flat_map(of).collect()
}

/// The state as it is now, in the memory set aside.
pub(super) fn copy(here: Here<'_>, files: &[File], snapshot: &Arena) -> Result<Vec<Source>, DeviceError> {
    let (home, stream) = (here.optimizer.home(), &here.world.stream);
    let mut end = 0;
    let mut copied = |buffer: &Buffer| -> Result<Buffer, DeviceError> {
        let target = snapshot.slice(end..end + buffer.bytes());
        end += buffer.bytes();
        home.download_to(*stream, buffer, &mut target.host_bytes_mut()?)?;
        Ok(target)
    };
    files
        .iter()
        .map(|file| {
            let of_extent = |buffers: &Vec<Buffer>| buffers.iter().map(&mut copied).collect();
            let buffers: Result<Vec<Vec<Buffer>>, _> = file.buffers.iter().map(of_extent).collect();
            buffers.map(Source::Snapshot)
        })
        .collect()
}
