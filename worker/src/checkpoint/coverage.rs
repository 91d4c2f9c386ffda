//! Do regions make up each tensor, and ranges each region, without gaps and overlaps.

use std::collections::BTreeMap;

use super::CheckpointError;
use super::manifest::{RegionRecord, TensorRecord};

/// Most corners that the regions of a tensor may have, 2 to the number of cut dimensions each: it bounds memory and time.
const MAX_CORNERS: u64 = 1 << 18;

/// Sorts the regions of a tensor and their ranges, and checks that each element is in exactly one range.
pub(super) fn check(tensor: &mut TensorRecord) -> Result<(), CheckpointError> {
    tensor.regions.sort_by(|a, b| a.region.cmp(&b.region));
    let checked = check_regions(tensor).and_then(|()| tensor.regions.iter_mut().try_for_each(check_ranges));
    checked.map_err(|what| CheckpointError::Coverage {
        tensor: tensor.name.to_string(),
        what,
    })
}

/// Each element of the tensor is in one region; the error is in words.
///
/// A corner of a box counts +1 or −1, by whether it has an even or an odd number of ends. These sums determine how many
/// boxes each element is in: they are those of the whole tensor exactly if the boxes tile it. At the first corner that
/// differs no earlier one contributes, so its sum is by how much the element there is counted wrongly.
fn check_regions(tensor: &TensorRecord) -> Result<(), String> {
    let shape = &tensor.shape;
    if tensor.elements().is_none() {
        return Err(format!("shape {shape:?} has more elements than can be counted"));
    }
    if let Some(found) = tensor.regions.iter().find(|found| !found.region.is_within(shape)) {
        return Err(format!("region {} is no box of shape {shape:?}", found.region));
    }
    if tensor.elements() == Some(0) {
        return Ok(());
    }
    let is_cut = |dim: &usize| {
        let mut bounds = tensor.regions.iter().map(|found| found.region.bounds()[*dim]);
        bounds.any(|bounds| bounds != [0, shape[*dim]])
    };
    let cut: Vec<usize> = (0..shape.len()).filter(is_cut).collect();
    let each = u32::try_from(cut.len())
        .ok()
        .and_then(|dims| 1_u64.checked_shl(dims));
    let corners = each.and_then(|each| each.checked_mul(tensor.regions.len() as u64 + 1));
    let Some(each) = each.filter(|_| corners.is_some_and(|corners| corners <= MAX_CORNERS)) else {
        let regions = tensor.regions.len();
        return Err(format!(
            "it has {regions} regions, cut along {} dimensions: more than are checked",
            cut.len()
        ));
    };
    let whole = cut.iter().map(|&dim| [0, shape[dim]]).collect::<Vec<_>>();
    let boxes = tensor.regions.iter().map(|found| {
        let bounds = found.region.bounds();
        (1_i64, cut.iter().map(|&dim| bounds[dim]).collect())
    });
    let mut sums: BTreeMap<Vec<u64>, i64> = BTreeMap::new();
    for (weight, bounds) in boxes.chain([(-1, whole)]) {
        for corner in 0..each {
            let ends = |dim: usize| (corner >> dim & 1) as usize;
            let at = bounds
                .iter()
                .enumerate()
                .map(|(dim, bounds)| bounds[ends(dim)])
                .collect();
            let sign = if corner.count_ones().is_multiple_of(2) {
                weight
            } else {
                -weight
            };
            *sums.entry(at).or_default() += sign;
        }
    }
    let Some((at, sum)) = sums.into_iter().find(|(_, sum)| *sum != 0) else {
        return Ok(());
    };
    let mut element = vec![0; shape.len()];
    cut.iter().zip(at).for_each(|(&dim, index)| element[dim] = index);
    let times = if sum < 0 {
        "no region"
    } else {
        "more than one region"
    };
    Err(format!("element {element:?} is in {times}"))
}

/// Sorts the ranges of a region, and checks that each element is in one of them; the error is in words.
fn check_ranges(found: &mut RegionRecord) -> Result<(), String> {
    let elements = found.region.elements().unwrap_or(0);
    let region = &found.region;
    found.ranges.sort_by_key(|range| (range.start, range.end));
    let mut covered = 0;
    for range in &found.ranges {
        let (start, end, file) = (range.start, range.end, &range.file);
        if start > end || end > elements {
            return Err(format!(
                "`{file}` has elements {start}..{end} of {elements} of region {region}"
            ));
        }
        if start > covered {
            return Err(format!(
                "elements {covered}..{start} of region {region} are in no file"
            ));
        }
        if start < covered {
            let both = covered.min(end);
            return Err(format!(
                "elements {start}..{both} of region {region} are twice, also in `{file}`"
            ));
        }
        covered = end;
    }
    if covered < elements {
        return Err(format!(
            "elements {covered}..{elements} of region {region} are in no file"
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "coverage_tests.rs"]
mod tests;
