//! What of the state a rank owns, and where it is in memory: what it writes to a checkpoint, and reads from one.
//!
//! Parameters are the f32 masters, so that a run may go on in another precision. A checkpoint names regions of tensors and
//! ranges of their elements. Where data-parallel ranks hold copies of the same state, each writes an equal part of it, by
//! [`crate::parallel::StateGroup`]; of the copies along other axes the first ranks write ([`is_counted`]).

use std::ops::Range;

use crate::checkpoint::{Extent, Reader, TensorKind, share_of};
use crate::device::{Arena, Buffer, DeviceError, evict};
use crate::model::{ParamId, ParamSpec, Run};
use crate::optim::Optimizer;
use crate::parallel::{ArenaRanges, ArenaShare, MODEL_AXES, OwnPiece, Sharding, is_counted, summed_over};
use crate::session::Session;
use crate::train::TrainError;
use crate::train::rank_table::RankTable;
use crate::train::replica::Replica;
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

/// A rank's part of the tensors of one kind, one of each parameter.
pub(super) struct OwnTensors {
    pub(super) kind: TensorKind,
    pub(super) extents: Vec<Extent>,
    /// The elements of each extent, in order.
    pub(super) buffers: Vec<Vec<Buffer>>,
}

/// What this rank writes of the state.
pub(super) fn written(here: RankState<'_>) -> Vec<OwnTensors> {
    let (parameters, mesh) = (&here.replica.parameters, &here.world.mesh);
    let roles = |id: ParamId| &here.replica.model.params[id.0].roles;
    let is_first = |id| is_counted(roles(id), &MODEL_AXES, mesh.shape(), mesh.rank());
    let pieces = parameters.replica_set().groups.iter().flat_map(|group| {
        let is_written = |id| group.axes == summed_over(roles(id)) && is_first(id);
        let copies = group.copies.as_ref().map(|copies| (copies.rank(), copies.size()));
        let (copy, copies) = copies.unwrap_or((0, 1));
        written_by(parameters.sharding(), is_written, copy, copies)
    });
    own_tensors(here, &pieces.collect::<Vec<_>>())
}

/// Loads what this rank owns of the state. Every rank calls it.
pub(crate) fn load(here: RankState<'_>, saved: &Reader) -> Result<(), TrainError> {
    let pieces = here.replica.parameters.sharding().own_pieces();
    let own = own_tensors(here, &pieces);
    let kinds: Vec<TensorKind> = own.iter().map(|tensors| tensors.kind.clone()).collect();
    saved.expect(&Extent::of_model(&kinds, &here.replica.model.all_params))?;
    let (home, stream) = (here.optimizer.home(), here.world.compute.stream);
    for OwnTensors { extents, buffers, .. } in own {
        for (extent, buffers) in extents.into_iter().zip(buffers) {
            let bytes = saved.read(&extent)?;
            let mut rest = bytes.as_slice();
            for buffer in &buffers {
                let (now, later) = rest.split_at(buffer.bytes());
                home.upload(stream, buffer, now);
                evict(buffer);
                rest = later;
            }
        }
    }
    home.synchronize(stream)?;
    Ok(())
}

/// Puts a copy of the state as it is now, in memory of the host that was set aside, in the place of the state itself.
pub(super) fn copy(here: RankState<'_>, own: &mut [OwnTensors], snapshot: &Arena) -> Result<(), DeviceError> {
    let mut end = 0;
    let buffers = own.iter_mut().flat_map(|tensors| &mut tensors.buffers);
    for buffer in buffers.flatten() {
        let target = snapshot.slice(end..end + buffer.bytes());
        end += buffer.bytes();
        let home = here.optimizer.home();
        home.download_to(here.world.compute.stream, buffer, &mut target.host_bytes_mut()?)?;
        *buffer = target;
    }
    Ok(())
}

/// Some pieces of each tensor of the state: parameters, and the optimizer's slots.
fn own_tensors(here: RankState<'_>, pieces: &[OwnPiece]) -> Vec<OwnTensors> {
    let (parameters, params) = (&here.replica.parameters, &here.replica.model.params);
    let of_kind = |(kind, share): (TensorKind, &ArenaShare)| {
        let own = pieces.iter().flat_map(|piece| extents(&kind, piece, params));
        let placed = own.map(|(extent, places)| {
            let buffers = places.iter().map(|place| share.slice(place)).collect();
            (extent, buffers)
        });
        let (extents, buffers) = placed.unzip();
        OwnTensors {
            kind,
            extents,
            buffers,
        }
    };
    let masters = (TensorKind::Parameter, here.optimizer.masters(parameters.own()));
    let slots = here.optimizer.slots();
    let slots = slots.map(|(name, share)| (TensorKind::State(name.to_owned()), share));
    std::iter::once(masters).chain(slots).map(of_kind).collect()
}

/// What a rank writes: of what it owns, and no other rank writes, its part where it holds one of several copies of that.
fn written_by(
    sharding: &Sharding,
    is_written: impl Fn(ParamId) -> bool,
    copy: usize,
    copies: usize,
) -> Vec<OwnPiece> {
    let mut own = sharding.own_pieces();
    own.retain(|piece| is_written(piece.param));
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

/// What a checkpoint calls a piece of a parameter's tensor of some kind, and where the elements of each extent are, in
/// order.
fn extents(kind: &TensorKind, piece: &OwnPiece, params: &[ParamSpec]) -> Vec<(Extent, Vec<ArenaRanges>)> {
    let spec = &params[piece.param.0];
    let runs = spec.runs(piece.elements.clone());
    let regions = spec.regions().into_iter().enumerate();
    let own = regions.filter_map(|(index, region)| {
        let runs: Vec<&Run> = runs.iter().filter(|run| run.region == index).collect();
        let (first, last) = (runs.first()?, runs.last()?);
        let extent = Extent {
            region,
            range: first.in_region as u64..(last.in_region + last.local.len()) as u64,
            ..Extent::whole(kind, spec)
        };
        let places = runs.iter().map(|run| place_of(piece, &run.local)).collect();
        Some((extent, places))
    });
    own.collect()
}

/// Where some elements of a piece are.
fn place_of(piece: &OwnPiece, elements: &Range<usize>) -> ArenaRanges {
    let within = |range: &Range<usize>| {
        let start = range.start + (elements.start - piece.elements.start);
        start..start + elements.len()
    };
    ArenaRanges {
        whole: within(&piece.place.whole),
        shard: within(&piece.place.shard),
    }
}

#[cfg(test)]
#[path = "owned_state_tests.rs"]
mod tests;
