//! Where activations lie in one run of memory: the lowest hole that is wide enough.
//!
//! That choice does not depend on how long the run is, so what was placed in endless memory once finds the same places,
//! and fits, in memory of the [`Placement::extent`] that it then had.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::device::Arena;

/// Places taken, by their first byte. All sizes in bytes.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    /// Bytes that may be used.
    limit: usize,
    /// End of each place by its start.
    taken: BTreeMap<usize, usize>,
    extent: usize,
}

impl Placement {
    /// All of the memory is free.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            taken: BTreeMap::new(),
            extent: 0,
        }
    }

    /// A place for so many bytes, which begins at a multiple of [`Arena::ALIGNMENT`]; none if no hole is wide enough.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        // A place of no bytes would share its start with another.
        let bytes = bytes.max(1).checked_next_multiple_of(Arena::ALIGNMENT)?;
        let mut start = 0;
        for (&next, &end) in &self.taken {
            if next - start >= bytes {
                break;
            }
            start = end;
        }
        let end = start.checked_add(bytes).filter(|&end| end <= self.limit)?;
        self.taken.insert(start, end);
        self.extent = self.extent.max(end);
        Some(start..end)
    }

    /// Frees the place that begins there.
    pub(super) fn free(&mut self, start: usize) {
        self.taken.remove(&start);
    }

    /// End of the last place there ever was.
    pub(super) const fn extent(&self) -> usize {
        self.extent
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_lowest_hole_that_is_wide_enough_is_taken() {
        let mut places = Placement::new(2048);
        let starts = [1, 512, 256, 300].map(|bytes| places.take(bytes).unwrap().start);
        assert_eq!(starts, [0, 256, 768, 1024]);
        places.free(0);
        places.free(768);
        assert_eq!(places.take(257), Some(1536..2048));
        assert_eq!(places.take(256), Some(0..256));
        assert_eq!(places.take(0), Some(768..1024));
        assert_eq!(places.take(1), None);
        places.free(1536);
        assert_eq!(places.take(512), Some(1536..2048));
        assert_eq!(places.extent(), 2048);
    }

    #[test]
    fn sizes_beyond_all_memory_have_no_place() {
        assert_eq!(Placement::new(usize::MAX).take(usize::MAX), None);
    }

    proptest! {
        #[test]
        fn what_fitted_in_endless_memory_fits_in_its_extent(
            moves in prop::collection::vec((0_usize..5000, any::<prop::sample::Index>(), any::<bool>()), 0..80),
        ) {
            let mut endless = Placement::new(usize::MAX);
            let play = |places: &mut Placement| {
                let mut held: Vec<Range<usize>> = Vec::new();
                let mut all = Vec::new();
                for (bytes, which, frees) in &moves {
                    if *frees && !held.is_empty() {
                        places.free(held.swap_remove(which.index(held.len())).start);
                    } else {
                        let place = places.take(*bytes).unwrap();
                        assert!(place.len() >= *bytes);
                        assert!(held.iter().all(|h| h.end <= place.start || place.end <= h.start));
                        all.push(place.clone());
                        held.push(place);
                    }
                }
                for place in held {
                    places.free(place.start);
                }
                all
            };
            let first = play(&mut endless);
            let mut exact = Placement::new(endless.extent());
            // As often as one likes, and to the same places.
            prop_assert_eq!(&play(&mut exact), &first);
            prop_assert_eq!(&play(&mut exact), &first);
        }
    }
}
