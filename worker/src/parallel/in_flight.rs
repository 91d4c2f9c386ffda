//! Memory for gradients on their way, beside the gradients that a rank keeps.

use super::grad_shard::staged;
use super::reduce_unit::Unit;
use super::wire;
use super::{Between, GradientLayout, ShardUnit, Sharding};
use crate::config::Sync;

/// Elements of the slots that gradients cross the wire in, of the layout's type: of units that are staged where only
/// shards are kept, of units that are narrowed where whole gradients have another type, else none. A pure function:
/// the reducer allocates as many.
#[must_use]
pub fn in_flight_slots(
    layout: &GradientLayout,
    sharding: &Sharding,
    between: Option<Between>,
    sync: Sync,
) -> usize {
    let is_narrowed = layout.dtype() != layout.accumulated();
    let sizes = match between {
        Some(Between::Shard) => staged(layout, sharding).0,
        _ if !is_narrowed => Vec::new(),
        Some(Between::Full) => wire::slots(sharding.units().iter().map(ShardUnit::len)),
        None => wire::slots(Unit::of_layout(layout, sync).iter().map(|unit| unit.range.len())),
    };
    sizes.iter().sum()
}
