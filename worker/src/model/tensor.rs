//! What blocks ask of the ranks that hold a model together: tensor parallelism (Shoeybi et al. 2019) and sequence
//! parallelism (Korthikanti et al. 2022).
//!
//! A block that has a part of its heads, columns or vocabulary makes partial sums, and all-reduces them; one that has a
//! part of the rows gathers all of them before a product, and reduce-scatters the partial sums behind it. Which ranks do
//! that, and how, is not known here; without a group everything is local. The ranks that hold the experts of a layer together
//! exchange rows ([`ExpertOps`]: expert parallelism, Lepikhin et al. 2021).
//!
//! | | forward | backward |
//! |---|---|---|
//! | into a layer whose outputs are cut | own rows are gathered (`Context::all_rows`) | sums of all ranks (`Context::summed_rows`) |
//! | out of a layer whose inputs are cut | sums of all ranks (`Context::summed_rows`) | own rows are gathered (`Context::gathered_rows`) |

use std::ops::Range;

use super::Activation;
use crate::device::{DeviceError, Event, Result};

/// The ranks that hold one copy of a model together, as one of them sees it.
///
/// All of them start the same exchanges in the same order, of activations of the same sizes. An exchange works in place,
/// begins when what the compute stream was given before it has run, and runs beside what it is given after it. The rows
/// of an activation `[…, C]` are those of the matrix `[R, C]`; each rank's own are `R/t` consecutive ones, in rank order.
pub trait GroupOps {
    /// Place of this rank in the group, from 0: which part of everything cut it has.
    fn index(&self) -> usize;

    /// Ranks `t` of the group.
    fn size(&self) -> usize;

    /// Each rank holds its own rows of the residual stream: sequence parallelism.
    fn is_sequence(&self) -> bool;

    /// Keys and values go round the group ([`GroupOps::pass_on`]), instead of being gathered.
    fn is_ring(&self) -> bool;

    /// Starts an exchange of `x`, which nothing may use until it is finished; `name` is for errors and traces. Refuses
    /// rows that are not as many on every rank. An error that is known already is returned.
    fn start(&self, kind: ExchangeKind, x: &Activation, name: &str) -> Result<Exchange>;

    /// Starts to send the first activation to the next rank, the first after the last, and to receive the second from the rank
    /// before, as [`GroupOps::start`] does.
    fn pass_on(&self, sent_and_received: [&Activation; 2], name: &str) -> Result<[Exchange; 2]>;

    /// What the compute stream is given from here on runs after the exchange, of which it returns the activation. An error that
    /// is known already is returned.
    fn finish(&self, exchange: Exchange) -> Result<Activation>;

    /// [`ExchangeKind::AllReduce`], from start to finish.
    fn all_reduce(&self, x: &Activation, name: &str) -> Result<()> {
        self.finish(self.start(ExchangeKind::AllReduce, x, name)?)
            .map(drop)
    }

    /// [`ExchangeKind::GatherRows`], from start to finish.
    fn gather_rows(&self, x: &Activation, name: &str) -> Result<()> {
        self.finish(self.start(ExchangeKind::GatherRows, x, name)?)
            .map(drop)
    }

    /// This rank's rows of the whole, `[R/t, C]`, in its memory.
    fn own_rows(&self, whole: &Activation) -> Result<Activation> {
        Ok(whole.rows(own_rows(whole, [self.index(), self.size()])?))
    }
}

/// The ranks that hold the experts of a layer together, as one of them sees it.
pub trait ExpertOps: GroupOps {
    /// Sends every rank how many rows its experts get, of the first numbers, `[E]`, and receives in the second ones, `[ranks,
    /// E/ranks]`, how many each sends to this rank's experts. The host waits for both. `all_and_most`: the sum of the first where
    /// nothing runs, and the most rows that one rank sends to these experts. More are an error.
    fn count(&self, numbers: [&Activation; 2], all_and_most: [usize; 2]) -> Result<[Vec<i32>; 2]>;

    /// Sends the first rows, and receives the second ones: as many to and of each rank as the counts say. What the compute
    /// stream is given from here on runs after that.
    fn exchange(&self, rows: [&Activation; 2], counts: [&[usize]; 2]) -> Result<()>;
}

/// What the ranks do with an activation that each of them has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// Every rank ends with the sum over the ranks, in rank order.
    AllReduce,
    /// Every rank gives its own rows, and ends with all of them. Of the statistics `[t, R, 3]` of a loss by parts of the
    /// vocabulary, a rank's own rows are its `[R, 3]`.
    GatherRows,
    /// Every rank ends with the sum over the ranks in its own rows; what is in the others is unspecified.
    ReduceScatterRows,
}

/// An exchange that was started. It keeps the activation until [`GroupOps::finish`].
#[derive(Debug)]
#[must_use = "the memory may be reused before the exchange is finished"]
pub struct Exchange {
    done: Event,
    activation: Activation,
}

impl Exchange {
    /// The exchange of `activation` that is done at an event.
    pub fn new(done: Event, activation: &Activation) -> Self {
        Self {
            done,
            activation: activation.clone(),
        }
    }

    /// Reached when it is done, or has failed.
    pub fn done(&self) -> &Event {
        &self.done
    }

    /// What it is of.
    pub fn into_activation(self) -> Activation {
        self.activation
    }
}

/// The rows of the rank at an index of so many; refuses an activation whose rows they cannot share evenly.
pub fn own_rows(whole: &Activation, [index, size]: [usize; 2]) -> Result<Range<usize>> {
    let rows = whole.row_count();
    if !rows.is_multiple_of(size) {
        let what = format!(
            "{rows} rows are not {size} equal parts\n  hint: under sequence parallelism the positions of a micro-batch must be a multiple of the tensor group's ranks"
        );
        let op = "rows of a tensor group";
        return Err(DeviceError::Shape { op, what });
    }
    let own = rows / size;
    Ok(index * own..(index + 1) * own)
}
