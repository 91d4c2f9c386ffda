//! What of the state a rank writes to a checkpoint, and where it is in memory.
//!
//! Parameters are the f32 masters, so that a run may go on in another precision. A checkpoint names regions of tensors and
//! ranges of their elements. Where ranks hold copies of the same state, each writes an equal part of it.

use std::ops::Range;

use crate::checkpoint::{Extent, TensorKind, share_of};
use crate::model::ParamSpec;
use crate::optim::Optimizer;
use crate::parallel::{OwnPiece, Place, Portion, Sharding};

/// Tensors of one kind, one of each parameter, and the memory that holds this rank's part of them.
pub(super) struct Part<'a> {
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
pub(super) fn parts<'a>(params: &'a Portion, optimizer: &'a Optimizer) -> Vec<Part<'a>> {
    let parameters = Part {
        kind: TensorKind::Parameter,
        portion: optimizer.masters(params),
    };
    let slots = optimizer.slots().map(|(name, portion)| Part {
        kind: TensorKind::State(name.to_owned()),
        portion,
    });
    [parameters].into_iter().chain(slots).collect()
}

/// What `rank` of `ranks` writes: its part of what it owns, if others own the same.
pub(super) fn written_by(sharding: &Sharding, rank: usize, ranks: usize) -> Vec<OwnPiece> {
    let own = sharding.own_pieces();
    let copies = (ranks / sharding.world()).max(1);
    let ranges: Vec<_> = own
        .iter()
        .map(|piece| piece.elements.start as u64..piece.elements.end as u64)
        .collect();
    share_of(&ranges, rank / sharding.world(), copies)
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

#[cfg(test)]
#[path = "owned_tests.rs"]
mod tests;
