//! Against counting element by element, and on numbers that a hostile manifest may have.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

use crate::device::DType;
use crate::model::Region;

type Bounds = Vec<[u64; 2]>;

fn range(start: u64, end: u64) -> RangeRecord {
    RangeRecord {
        file: format!("f{start}"),
        entry: "w".into(),
        start,
        end,
        blocks: Vec::new(),
    }
}

fn tensor(shape: &[u64], regions: Vec<(Bounds, Vec<RangeRecord>)>) -> TensorRecord {
    let record = |(bounds, ranges)| RegionRecord {
        region: Region::new(bounds),
        ranges,
    };
    TensorRecord {
        name: TensorKind::Parameter.of("w"),
        shape: shape.to_vec(),
        dtype: DType::F32,
        regions: regions.into_iter().map(record).collect(),
    }
}

fn check_ranges(shape: &[u64], ranges: &[(u64, u64)]) -> Result<Vec<u64>, String> {
    let ranges = ranges.iter().map(|&(start, end)| range(start, end)).collect();
    let whole = Region::whole(shape).bounds().to_vec();
    let mut tensor = tensor(shape, vec![(whole, ranges)]);
    tensor.check()?;
    Ok(tensor.ranges().map(|(_, range)| range.start).collect())
}

/// Each box in one range.
fn check_boxes(shape: &[u64], boxes: &[Bounds]) -> Result<(), String> {
    let with_range = |bounds: &Bounds| {
        let elements = Region::new(bounds.clone()).elements().unwrap_or(0);
        (bounds.clone(), vec![range(0, elements)])
    };
    let mut tensor = tensor(shape, boxes.iter().map(with_range).collect());
    tensor.check()
}

#[test]
fn whole_tensors_pass_in_any_order() {
    assert_eq!(check_ranges(&[2, 3], &[(4, 6), (0, 4)]), Ok(vec![0, 4]));
    assert_eq!(check_ranges(&[], &[(0, 1)]), Ok(vec![0]));
    assert_eq!(check_ranges(&[0, 3], &[]), Ok(vec![]));
    assert_eq!(check_ranges(&[4], &[(0, 4), (0, 0)]), Ok(vec![0, 0]));
}

#[test]
fn gaps_and_overlaps_of_ranges_are_named() {
    let error = |shape: &[u64], ranges: &[(u64, u64)]| check_ranges(shape, ranges).unwrap_err();
    assert!(error(&[6], &[(0, 2), (3, 6)]).ends_with("elements 2..3 of region [0..6] are in no file"));
    assert!(error(&[6], &[(1, 6)]).ends_with("elements 0..1 of region [0..6] are in no file"));
    assert!(error(&[6], &[(0, 5)]).ends_with("elements 5..6 of region [0..6] are in no file"));
    assert!(error(&[6], &[]).ends_with("elements 0..6 of region [0..6] are in no file"));
    assert!(
        error(&[6], &[(0, 4), (3, 6)])
            .ends_with("elements 3..4 of region [0..6] are stored twice, also in `f3`")
    );
    assert!(error(&[6], &[(0, 7)]).ends_with("`f0` has elements 0..7 of 6 of region [0..6]"));
    assert!(error(&[6], &[(u64::MAX, u64::MAX)]).contains("of 6 of region"));
    assert!(error(&[6], &[(5, 2)]).contains("has elements 5..2 of 6"));
}

#[test]
fn gaps_and_overlaps_of_regions_are_named() {
    let error = |boxes: &[Bounds]| check_boxes(&[4, 6], boxes).unwrap_err();
    let halves = [vec![[0, 4], [0, 2]], vec![[0, 4], [3, 6]]];
    assert!(error(&halves).ends_with("element [0, 2] is in no region"));
    let both = [vec![[0, 4], [0, 4]], vec![[1, 4], [3, 6]], vec![[0, 1], [4, 6]]];
    assert!(error(&both).ends_with("element [1, 3] is in more than one region"));
    let twice = [vec![[0, 4], [0, 6]], vec![[0, 4], [0, 6]]];
    assert!(error(&twice).ends_with("element [0, 0] is in more than one region"));
    assert!(error(&[]).ends_with("element [0, 0] is in no region"));
    assert!(error(&[vec![[0, 4]]]).ends_with("region [0..4] does not fit shape [4, 6]"));
    assert!(error(&[vec![[0, 4], [0, 7]]]).ends_with("region [0..4, 0..7] does not fit shape [4, 6]"));
    assert!(error(&[vec![[3, 2], [0, 6]]]).contains("does not fit shape"));
    // A hole in the middle of four boxes, and five that fill it.
    let mut wheel = vec![
        vec![[0, 1], [0, 5]],
        vec![[0, 3], [5, 6]],
        vec![[3, 4], [1, 6]],
        vec![[1, 4], [0, 1]],
    ];
    assert!(error(&wheel).ends_with("element [1, 1] is in no region"));
    wheel.push(vec![[1, 3], [1, 5]]);
    assert_eq!(check_boxes(&[4, 6], &wheel), Ok(()));
    wheel.push(vec![[2, 2], [1, 5]]);
    assert_eq!(
        check_boxes(&[4, 6], &wheel),
        Ok(()),
        "a box without elements is in nobody's way"
    );
}

#[test]
fn numbers_near_the_largest_are_refused_without_overflow() {
    let max = u64::MAX;
    let error = |shape: &[u64], boxes: &[Bounds]| check_boxes(shape, boxes).unwrap_err();
    assert!(error(&[max, 2], &[]).contains("more elements than can be counted"));
    assert!(
        error(&[max], &[vec![[0, max - 1]]]).ends_with(&format!("element [{}] is in no region", max - 1))
    );
    assert!(error(&[max], &[vec![[0, max]], vec![[max - 1, max]]]).contains("is in more than one region"));
    assert_eq!(
        check_boxes(&[max], &[vec![[0, max - 1]], vec![[max - 1, max]]]),
        Ok(())
    );
    assert_eq!(
        check_boxes(&[0, max, max], &[vec![[0, 0], [0, max], [0, max]]]),
        Ok(())
    );
    assert_eq!(check_boxes(&[3, 0], &[]), Ok(()));
}

#[test]
fn many_regions_are_checked_or_refused_in_time() {
    let started = Instant::now();
    let n = 1 << 16;
    let rows: Vec<Bounds> = (0..n).map(|i| vec![[i, i + 1], [0, 8]]).collect();
    assert_eq!(check_boxes(&[n, 8], &rows), Ok(()));
    // All of them one and the same.
    let same = vec![vec![[0, n], [0, 8]]; 1 << 18];
    assert!(check_boxes(&[n, 8], &same).is_err());
    let cut_everywhere = vec![vec![[0, 1]; 60]; 3];
    assert!(
        check_boxes(&[2; 60], &cut_everywhere)
            .unwrap_err()
            .contains("more than can be checked")
    );
    assert!(check_boxes(&[2; 80], &[]).is_err());
    // They are few, and were 131,072 corners of 17 numbers each.
    let few_but_cut = vec![vec![[0, 1]; 17]];
    let error = check_boxes(&[2; 17], &few_but_cut).unwrap_err();
    assert!(
        error.contains("cut along 17 dimensions: more than can be checked"),
        "{error}"
    );
    assert!(started.elapsed() < Duration::from_mins(1));
}

/// Few boxes in a small tensor: some of them tile it.
fn boxes() -> impl Strategy<Value = (Vec<u64>, Vec<Bounds>)> {
    let cells = prop::collection::vec(prop::collection::vec(1_u64..3, 1..4), 1..4);
    let noise = prop::collection::vec((any::<prop::sample::Index>(), 0_usize..3, any::<bool>()), 0..3);
    (cells, noise).prop_map(|(lens, noise)| {
        let shape: Vec<u64> = lens.iter().map(|lens| lens.iter().sum()).collect();
        // A grid, each cell a box.
        let mut boxes: Vec<Bounds> = vec![Vec::new()];
        for lens in &lens {
            let ends = lens.iter().scan(0, |end, len| {
                *end += len;
                Some([*end - len, *end])
            });
            let along: Vec<[u64; 2]> = ends.collect();
            let longer = |bounds: &Bounds| -> Vec<Bounds> {
                along
                    .iter()
                    .map(|next| [bounds.clone(), vec![*next]].concat())
                    .collect()
            };
            boxes = boxes.iter().flat_map(longer).collect();
        }
        for (which, dim, drops) in noise {
            let at = which.index(boxes.len());
            if drops && boxes.len() > 1 {
                boxes.remove(at);
            } else {
                let dim = dim % shape.len();
                boxes[at][dim] = [0, shape[dim]];
            }
        }
        (shape, boxes)
    })
}

proptest! {
    #[test]
    fn boxes_pass_exactly_if_each_element_is_in_one((shape, boxes) in boxes()) {
        let inside = |element: &[u64], bounds: &Bounds| {
            element.iter().zip(bounds).all(|(i, [start, end])| (start..end).contains(&i))
        };
        let mut elements: Vec<Vec<u64>> = vec![Vec::new()];
        for &len in &shape {
            elements = elements
                .iter()
                .flat_map(|element| (0..len).map(move |i| [element.clone(), vec![i]].concat()))
                .collect();
        }
        let count = |element: &Vec<u64>| boxes.iter().filter(|bounds| inside(element, bounds)).count();
        let wrong = elements.iter().find(|element| count(element) != 1);
        match (check_boxes(&shape, &boxes), wrong) {
            (Ok(()), None) => {}
            (Err(error), Some(first)) => {
                let times = if count(first) == 0 { "no region" } else { "more than one region" };
                prop_assert!(error.ends_with(&format!("element {first:?} is in {times}")), "{} {:?}", error, first);
            }
            (found, wrong) => prop_assert!(false, "{:?}, {:?}", found, wrong),
        }
    }
}
