//! What of the state a rank writes to a checkpoint, and where it is in memory.
//!
//! Parameters are the f32 masters, so that a run may go on in another precision. A checkpoint names regions of tensors and
//! ranges of their elements. Where ranks hold copies of the same state, each writes an equal part of it.

use std::ops::Range;

use super::save_thread::{SaveFile, Source};
use crate::checkpoint::{Extent, TensorKind, file_stem, share_of};
use crate::device::{Arena, Buffer, DeviceError};
use crate::model::ParamSpec;
use crate::optim::Optimizer;
use crate::parallel::{OwnPiece, Place, Portion, Sharding};
use crate::session::Session;
use crate::train::step::{RankTable, Replica};
use crate::train::world::World;

/// The rank, and the state that is saved.
#[derive(Clone, Copy)]
pub(crate) struct RankState<'a> {
    pub(crate) world: &'a World,
    pub(crate) replica: &'a Replica,
    pub(crate) optimizer: &'a Optimizer,
    pub(crate) rank_table: &'a RankTable,
    pub(crate) session: &'a Session,
}

/// Tensors of one kind, one of each parameter, and the memory that holds this rank's part of them.
pub(super) struct StateTensors<'a> {
    pub(super) kind: TensorKind,
    pub(super) portion: &'a Portion,
}

/// A part of a checkpoint that this rank holds.
pub(super) struct OwnExtent {
    pub(super) extent: Extent,
    /// Where its elements are, in order.
    pub(super) places: Vec<Place>,
}

/// The state of a run: parameters, and the optimizer's slots.
pub(super) fn tensors<'a>(params: &'a Portion, optimizer: &'a Optimizer) -> Vec<StateTensors<'a>> {
    let parameters = StateTensors {
        kind: TensorKind::Parameter,
        portion: optimizer.masters(params),
    };
    let slots = optimizer.slots().map(|(name, portion)| StateTensors {
        kind: TensorKind::State(name.to_owned()),
        portion,
    });
    [parameters].into_iter().chain(slots).collect()
}

/// What a rank writes: its part of what it owns, where it holds one of several copies of that.
pub(super) fn written_by(sharding: &Sharding, (copy, copies): (usize, usize)) -> Vec<OwnPiece> {
    let own = sharding.own_pieces();
    let ranges: Vec<_> = own
        .iter()
        .map(|piece| piece.elements.start as u64..piece.elements.end as u64)
        .collect();
    share_of(&ranges, copy, copies)
        .into_iter()
        .map(|(index, range)| {
            let elements = range.start as usize..range.end as usize;
            OwnPiece {
                param: own[index].param,
                place: place_of(&own[index], &elements),
                elements,
            }
        })
        .collect()
}

/// What a checkpoint calls a piece of a parameter's tensor of some kind.
pub(super) fn extents(kind: &TensorKind, piece: &OwnPiece, params: &[ParamSpec]) -> Vec<OwnExtent> {
    let spec = &params[piece.param.0];
    let whole = Extent::whole(kind, spec);
    let mut own: Vec<Option<OwnExtent>> = Vec::new();
    let regions = spec.regions();
    own.resize_with(regions.len(), || None);
    for run in spec.runs(piece.elements.clone()) {
        let place = place_of(piece, &run.local);
        let start = run.in_region as u64;
        let known = own[run.region].get_or_insert_with(|| OwnExtent {
            extent: Extent {
                region: regions[run.region].clone(),
                range: start..start,
                ..whole.clone()
            },
            places: Vec::new(),
        });
        known.extent.range.end = start + run.local.len() as u64;
        match known.places.last_mut() {
            Some(last) if last.shard.end == place.shard.start => {
                last.shard.end = place.shard.end;
                last.whole.end = place.whole.end;
            }
            _ => known.places.push(place),
        }
    }
    own.into_iter().flatten().collect()
}

/// Where some elements of a piece are.
fn place_of(piece: &OwnPiece, elements: &Range<usize>) -> Place {
    let within = |range: &Range<usize>| {
        let start = range.start + (elements.start - piece.elements.start);
        start..start + elements.len()
    };
    Place {
        whole: within(&piece.place.whole),
        shard: within(&piece.place.shard),
    }
}

/// A file that this rank writes, and where the state is that goes into it.
pub(super) struct OwnFile {
    stem: String,
    pub(super) extents: Vec<Extent>,
    /// The elements of each extent, in order.
    pub(super) buffers: Vec<Vec<Buffer>>,
}

impl OwnFile {
    pub(super) fn with((file, source): (Self, Source)) -> SaveFile {
        SaveFile {
            stem: file.stem,
            extents: file.extents,
            source,
        }
    }
}

/// One for each kind of tensor.
pub(super) fn files(here: RankState<'_>) -> Vec<OwnFile> {
    let (rank, ranks) = (here.world.rank(), here.world.size());
    let parameters = &here.replica.parameters;
    let own = written_by(parameters.sharding(), parameters.replica_set().copy());
    let params = &here.replica.model.params;
    let file = |part: &StateTensors<'_>| {
        let extents = own.iter().flat_map(|piece| extents(&part.kind, piece, params));
        let placed = extents.map(|OwnExtent { extent, places }| {
            let buffers = places.iter().map(|place| part.portion.slice(place)).collect();
            (extent, buffers)
        });
        let (extents, buffers) = placed.unzip();
        OwnFile {
            stem: file_stem(&part.kind, rank, ranks),
            extents,
            buffers,
        }
    };
    tensors(parameters.own(), here.optimizer)
        .iter()
        .map(file)
        .collect()
}

/// Names of the files of all ranks.
pub(super) fn stems(here: RankState<'_>) -> Vec<String> {
    let ranks = here.world.size();
    let parts = tensors(here.replica.parameters.own(), here.optimizer);
    let of = |rank| parts.iter().map(move |part| file_stem(&part.kind, rank, ranks));
    (0..ranks).flat_map(of).collect()
}

/// The state as it is now, in the memory set aside.
pub(super) fn copy(
    here: RankState<'_>,
    files: &[OwnFile],
    snapshot: &Arena,
) -> Result<Vec<Source>, DeviceError> {
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

#[cfg(test)]
#[path = "owned_state_tests.rs"]
mod tests;
