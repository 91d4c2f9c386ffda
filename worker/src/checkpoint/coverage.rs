//! Do the pieces make up each tensor, without gaps and overlaps.

use super::{CheckpointError, TensorRecord};

/// Sorts the pieces of a tensor and checks that each element is in exactly one of them.
pub(super) fn check(tensor: &mut TensorRecord) -> Result<(), CheckpointError> {
    let wrong = |what: String| CheckpointError::Coverage {
        tensor: tensor.name.clone(),
        what,
    };
    let Some(elements) = tensor.elements() else {
        return Err(wrong(format!(
            "shape {:?} has more elements than can be counted",
            tensor.shape
        )));
    };
    tensor.pieces.sort_by_key(|p| (p.start, p.end));
    let mut covered = 0;
    for piece in &tensor.pieces {
        let (start, end) = (piece.start, piece.end);
        if start > end || end > elements {
            return Err(wrong(format!(
                "`{}` has elements {start}..{end} of {elements}",
                piece.file
            )));
        }
        if start > covered {
            return Err(wrong(format!("elements {covered}..{start} are in no file")));
        }
        if start < covered {
            let both = covered.min(end);
            return Err(wrong(format!(
                "elements {start}..{both} are twice, also in `{}`",
                piece.file
            )));
        }
        covered = end;
    }
    if covered < elements {
        return Err(wrong(format!("elements {covered}..{elements} are in no file")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::PieceRecord;
    use crate::device::DType;

    fn check_ranges(shape: &[u64], ranges: &[(u64, u64)]) -> Result<Vec<u64>, String> {
        let piece = |&(start, end): &(u64, u64)| PieceRecord {
            file: format!("f{start}"),
            entry: "w".into(),
            start,
            end,
            blake3: String::new(),
        };
        let mut tensor = TensorRecord {
            name: "w".into(),
            shape: shape.to_vec(),
            dtype: DType::F32,
            pieces: ranges.iter().map(piece).collect(),
        };
        check(&mut tensor).map_err(|e| e.to_string())?;
        Ok(tensor.pieces.iter().map(|p| p.start).collect())
    }

    #[test]
    fn whole_tensors_pass_in_any_order() {
        assert_eq!(check_ranges(&[2, 3], &[(4, 6), (0, 4)]), Ok(vec![0, 4]));
        assert_eq!(check_ranges(&[], &[(0, 1)]), Ok(vec![0]));
        assert_eq!(check_ranges(&[0, 3], &[]), Ok(vec![]));
        assert_eq!(check_ranges(&[4], &[(0, 4), (0, 0)]), Ok(vec![0, 0]));
    }

    #[test]
    fn gaps_and_overlaps_are_named() {
        let error = |shape: &[u64], ranges: &[(u64, u64)]| check_ranges(shape, ranges).unwrap_err();
        assert!(error(&[6], &[(0, 2), (3, 6)]).ends_with("elements 2..3 are in no file"));
        assert!(error(&[6], &[(1, 6)]).ends_with("elements 0..1 are in no file"));
        assert!(error(&[6], &[(0, 5)]).ends_with("elements 5..6 are in no file"));
        assert!(error(&[6], &[]).ends_with("elements 0..6 are in no file"));
        assert!(error(&[6], &[(0, 4), (3, 6)]).ends_with("elements 3..4 are twice, also in `f3`"));
        assert!(error(&[6], &[(0, 7)]).ends_with("`f0` has elements 0..7 of 6"));
        assert!(error(&[u64::MAX, 2], &[]).contains("more elements than can be counted"));
    }
}
