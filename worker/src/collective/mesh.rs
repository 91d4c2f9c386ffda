//! The ranks as a grid with named dimensions, and a communicator along each of them.

use super::{CollectiveError, Communicator, Executor, Failure};

/// This rank's view of the grid. The last dimension varies fastest with the rank.
///
/// In a 2×2 mesh of `dp` and `tp`, ranks 0 and 1 are one `tp` group, ranks 0 and 2 one `dp` group.
#[derive(Clone)]
pub struct Mesh {
    dims: Vec<Dimension>,
}

#[derive(Clone)]
struct Dimension {
    name: String,
    group: Communicator,
}

impl Mesh {
    /// Arranges the ranks of `world`; the sizes must multiply to its size. Every rank must call it alike, with no
    /// operation in flight. Each group gets an executor of its own.
    pub fn new(
        world: &Communicator,
        dims: &[(&str, usize)],
        executor: Executor,
    ) -> Result<Self, CollectiveError> {
        let product = dims
            .iter()
            .try_fold(1_usize, |product, &(_, size)| product.checked_mul(size));
        if product != Some(world.size()) {
            return Err(refusal(world, dims));
        }
        let mut made = Vec::with_capacity(dims.len());
        for (index, &(name, size)) in dims.iter().enumerate() {
            let stride: usize = dims[index + 1..].iter().map(|&(_, size)| size).product();
            let members = line(world.rank(), size, stride);
            made.push(Dimension {
                name: name.to_owned(),
                group: world.split(name, &members, executor)?,
            });
        }
        Ok(Self { dims: made })
    }

    /// The ranks that differ from this one in dimension `dim` only; none if there is no such dimension.
    #[must_use]
    pub fn group(&self, dim: &str) -> Option<&Communicator> {
        self.dims.iter().find(|d| d.name == dim).map(|d| &d.group)
    }

    /// Where this rank stands along a dimension.
    #[must_use]
    pub fn coordinate(&self, dim: &str) -> Option<usize> {
        self.group(dim).map(Communicator::rank)
    }
}

/// The ranks on one line through `rank`.
fn line(rank: usize, size: usize, stride: usize) -> Vec<usize> {
    let coordinate = rank / stride % size;
    let first = rank - coordinate * stride;
    (0..size).map(|i| first + i * stride).collect()
}

fn refusal(world: &Communicator, dims: &[(&str, usize)]) -> CollectiveError {
    let sizes: Vec<String> = dims.iter().map(|(name, size)| format!("{name} {size}")).collect();
    CollectiveError {
        rank: world.members()[world.rank()],
        communicator: world.name().to_owned(),
        operation: "mesh".to_owned(),
        sequence: 0,
        bytes: 0,
        tag: sizes.join(" × "),
        failure: Failure::Invalid(format!(
            "the sizes do not multiply to {}\n  hint: they must use every rank exactly once",
            world.size()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_2_by_3_by_2_mesh() {
        assert_eq!(line(7, 2, 6), [1, 7]);
        assert_eq!(line(7, 3, 2), [7, 9, 11]);
        assert_eq!(line(7, 2, 1), [6, 7]);
    }
}
