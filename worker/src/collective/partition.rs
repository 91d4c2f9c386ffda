//! How a buffer is cut among the ranks of a group.

use std::ops::Range;

/// Slice `index` of `len` elements cut into `parts`: as equal as they can be, longer ones first.
pub(super) fn slice(len: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, longer) = (len / parts, len % parts);
    let start = index * each + index.min(longer);
    start..start + each + usize::from(index < longer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_adjacent_and_cover_everything() {
        for (len, parts) in [(0, 3), (1, 3), (7, 3), (9, 3), (1024, 7)] {
            let slices: Vec<_> = (0..parts).map(|i| slice(len, parts, i)).collect();
            assert_eq!(slices[0].start, 0);
            assert_eq!(slices[parts - 1].end, len);
            assert!(
                slices
                    .windows(2)
                    .all(|w| w[0].end == w[1].start && w[0].len() >= w[1].len())
            );
            assert!(slices[0].len() - slices[parts - 1].len() <= 1);
        }
    }
}
