//! What of the state a rank writes to a checkpoint, and where that lies.
//!
//! Parameters are the f32 masters, so that a run may go on in another precision. Tensors are logical: a name and a
//! range of elements. Where ranks hold copies of the same state, each writes an
//! equal part of it, so that nobody writes, or keeps a copy of, the whole.

use crate::checkpoint::{Extent, Kind, share_of};
use crate::device::DType;
use crate::model::ParamSpec;
use crate::optim::{AdamW, Moment};
use crate::parallel::{OwnPiece, Place, Portion, Sharding};

/// Tensors of one kind, one of each parameter, and where this rank's part of them lies.
pub(super) struct Part<'a> {
    pub(super) kind: Kind,
    pub(super) portion: &'a Portion,
}

/// The state of a run: parameters and moments.
pub(super) fn parts<'a>(params: &'a Portion, adamw: &'a AdamW) -> [Part<'a>; 3] {
    let moment = |kind, moment| Part {
        kind,
        portion: adamw.moment(moment),
    };
    let parameters = Part {
        kind: Kind::Parameter,
        portion: adamw.masters(params),
    };
    [
        parameters,
        moment(Kind::FirstMoment, Moment::First),
        moment(Kind::SecondMoment, Moment::Second),
    ]
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
            let OwnPiece {
                param,
                elements,
                place,
            } = &own[index];
            let range = range.start as usize..range.end as usize;
            let (from, to) = (range.start - elements.start, range.end - elements.start);
            OwnPiece {
                param: *param,
                elements: range,
                place: Place {
                    whole: place.whole.start + from..place.whole.start + to,
                    shard: place.shard.start + from..place.shard.start + to,
                },
            }
        })
        .collect()
}

/// A piece of a parameter's tensor of some kind, as a checkpoint names it.
pub(super) fn extent(kind: Kind, piece: &OwnPiece, params: &[ParamSpec]) -> Extent {
    Extent {
        range: piece.elements.start as u64..piece.elements.end as u64,
        ..whole(kind, &params[piece.param.0])
    }
}

/// All elements of a parameter's tensor of some kind.
pub(super) fn whole(kind: Kind, spec: &ParamSpec) -> Extent {
    Extent {
        tensor: format!("{}{}", kind.prefix(), spec.name),
        shape: spec.shape.iter().map(|&d| d as u64).collect(),
        dtype: DType::F32,
        range: 0..spec.len() as u64,
    }
}

#[cfg(test)]
#[path = "owned_tests.rs"]
mod tests;
