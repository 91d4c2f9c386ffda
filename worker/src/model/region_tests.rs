//! Against plain loops over single elements.

use proptest::prelude::*;

use super::*;

/// Number in row-major order.
fn number(index: &[u64], shape: &[u64]) -> u64 {
    index
        .iter()
        .zip(shape)
        .fold(0, |number, (i, len)| number * len + i)
}

/// The indices of a region, in order, one at a time.
fn indices(region: &Region) -> Vec<Vec<u64>> {
    region
        .bounds()
        .iter()
        .fold(vec![Vec::new()], |all, &[start, end]| {
            let longer = |index: &Vec<u64>| -> Vec<Vec<u64>> {
                let with = |i| index.iter().copied().chain([i]).collect();
                (start..end).map(with).collect()
            };
            all.iter().flat_map(longer).collect()
        })
}

/// Two boxes of up to three dimensions, and a range of each.
fn two_ranges() -> impl Strategy<Value = [(Region, Range<u64>); 2]> {
    let bounds = (0_u64..5, 0_u64..5).prop_map(|(start, len)| [start, start + len]);
    let pair = (0_usize..4).prop_flat_map(move |dims| {
        let one = prop::collection::vec(bounds.clone(), dims).prop_map(Region::new);
        [one.clone(), one]
    });
    let in_region = |region: Region| {
        let elements = region.elements().unwrap();
        (0..=elements, 0..=elements).prop_map(move |(a, b)| (region.clone(), a.min(b)..a.max(b)))
    };
    pair.prop_flat_map(move |[one, other]| [in_region(one).boxed(), in_region(other).boxed()])
}

/// A shape with one dimension of stretches, and how many parts each has.
fn cuts() -> impl Strategy<Value = (Vec<usize>, usize, Vec<usize>, usize)> {
    let outer = prop::collection::vec(1_usize..4, 0..3);
    let inner = prop::collection::vec(1_usize..4, 0..3);
    let stretches = prop::collection::vec(1_usize..4, 1..4);
    (outer, stretches, inner, 1_usize..4).prop_map(|(outer, stretches, inner, parts)| {
        let stretches: Vec<usize> = stretches.iter().map(|len| len * parts).collect();
        let dim = outer.len();
        let shape = [outer, vec![stretches.iter().sum()], inner].concat();
        (shape, dim, stretches, parts)
    })
}

proptest! {
    #[test]
    fn shared_runs_are_the_elements_of_both_in_order([(one, a), (other, b)] in two_ranges()) {
        let mut expected = Vec::new();
        let theirs = indices(&other);
        for (i, index) in indices(&one).iter().enumerate() {
            if let Some(j) = theirs.iter().position(|other| other == index)
                && a.contains(&(i as u64))
                && b.contains(&(j as u64))
            {
                expected.push((i as u64, j as u64));
            }
        }
        let overlap = Overlap::of(&one, &other);
        let runs: Vec<SharedRun> = overlap.iter().flat_map(|overlap| overlap.runs([a.clone(), b.clone()])).collect();
        let single = |run: &SharedRun| {
            let [a, b] = run.starts;
            (0..run.len).map(move |i| (a + i, b + i))
        };
        let found: Vec<(u64, u64)> = runs.iter().flat_map(single).collect();
        prop_assert_eq!(found, expected);
        if one == other && !a.is_empty() && a == b && one.elements() > Some(0) {
            prop_assert_eq!(runs.len(), 1, "neighbours stay together");
        }
    }

    #[test]
    fn the_parts_of_all_ranks_are_every_element_once((shape, dim, stretches, parts) in cuts()) {
        let global: Vec<u64> = shape.iter().map(|&len| len as u64).collect();
        let mut seen = vec![0; shape.iter().product()];
        for index in 0..parts {
            let cut = Cut::new(&shape, dim, &stretches, index, parts);
            let regions = cut.regions(&shape);
            let len: usize = cut.local_shape(&shape).iter().product();
            prop_assert_eq!(regions.iter().map(|r| r.elements().unwrap() as usize).sum::<usize>(), len);
            for index in regions.iter().flat_map(indices) {
                seen[number(&index, &global) as usize] += 1;
            }
        }
        prop_assert!(seen.iter().all(|&times| times == 1), "{:?}", seen);
    }

    #[test]
    fn runs_are_the_local_elements_in_order_wherever_they_begin(
        (shape, dim, stretches, parts) in cuts(),
        which in any::<prop::sample::Index>(),
        ends in any::<[prop::sample::Index; 2]>(),
    ) {
        let global: Vec<u64> = shape.iter().map(|&len| len as u64).collect();
        let cut = Cut::new(&shape, dim, &stretches, which.index(parts), parts);
        let regions = cut.regions(&shape);
        // The local tensor has the elements of its regions in the order of the whole one.
        let mut local: Vec<(Vec<u64>, usize, usize)> = Vec::new();
        for (region, bounds) in regions.iter().enumerate() {
            let numbered = indices(bounds).into_iter().enumerate();
            local.extend(numbered.map(|(i, index)| (index, region, i)));
        }
        local.sort();
        let [a, b] = ends.map(|end| end.index(local.len() + 1));
        let range = a.min(b)..a.max(b);
        let mut found = Vec::new();
        let mut next = range.start;
        for run in cut.runs(&shape, range.clone()) {
            prop_assert_eq!(run.local.start, next);
            next = run.local.end;
            found.extend((0..run.local.len()).map(|i| (run.global + i, run.region, run.in_region + i)));
        }
        let expected: Vec<(usize, usize, usize)> = local[range]
            .iter()
            .map(|(index, region, i)| (number(index, &global) as usize, *region, *i))
            .collect();
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn a_fused_qkv_is_three_boxes() {
    let cut = Cut::new(&[2, 12], 1, &[4, 4, 4], 1, 2);
    assert_eq!(cut.local_shape(&[2, 12]), [2, 6]);
    let regions: Vec<String> = cut.regions(&[2, 12]).iter().map(Region::to_string).collect();
    assert_eq!(regions, ["[0..2, 2..4]", "[0..2, 6..8]", "[0..2, 10..12]"]);
    let runs = cut.runs(&[2, 12], 5..8);
    let flat: Vec<_> = runs
        .iter()
        .map(|r| (r.local.clone(), r.region, r.in_region, r.global))
        .collect();
    assert_eq!(flat, [(5..6, 2, 1, 11), (6..8, 0, 2, 14)]);
}

#[test]
#[should_panic(expected = "there is no part 2 of 2")]
fn a_part_beyond_the_last_is_a_bug() {
    let _ = Cut::new(&[4, 6], 1, &[6], 2, 2);
}

#[test]
#[should_panic(expected = "[3, 3] cannot be divided into 2 equal parts")]
fn an_uneven_cut_is_a_bug() {
    let _ = Cut::new(&[4, 6], 1, &[3, 3], 0, 2);
}

#[test]
#[should_panic(expected = "do not make up dimension 1")]
fn stretches_of_another_length_are_a_bug() {
    let _ = Cut::new(&[4, 6], 1, &[4], 0, 1);
}

#[test]
fn numbers_near_the_largest_overflow_nothing() {
    let huge = Region::new(vec![[0, u64::MAX], [0, u64::MAX]]);
    assert_eq!(huge.elements(), None);
    assert_eq!(Region::new(vec![[5, 2]]).elements(), None);
    let empty = Region::new(vec![[0, 0], [0, u64::MAX], [0, u64::MAX]]);
    assert!(Overlap::of(&empty, &empty).is_none());
    let last = Region::new(vec![[u64::MAX - 1, u64::MAX]]);
    let overlap = Overlap::of(&last, &Region::whole(&[u64::MAX])).unwrap();
    let runs: Vec<SharedRun> = overlap.runs([0..1, 0..u64::MAX]).collect();
    assert_eq!(
        runs,
        [SharedRun {
            starts: [0, u64::MAX - 1],
            len: 1
        }]
    );
}
