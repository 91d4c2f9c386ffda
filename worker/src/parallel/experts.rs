//! The ranks that hold the experts of a layer together, over a communicator: what [`ExpertOps`] are for blocks.
//!
//! With e ranks, a rank sends (e−1)/e of its rows away on average: `k` rows of each position to their experts and back in
//! forward, and again in backward, as [`Traffic::Activations`]. How many go to whom depends on the router. The ranks exchange
//! these numbers first, and the host waits for them: it is the only wait of the host within a step.

use super::tensor::RankGroup;
use crate::collective::{AllToAll, Launch, Traffic};
use crate::device::DeviceError;
use crate::model::{Activation, Exchange, ExpertOps, GroupOps};

impl RankGroup {
    pub(super) fn all_to_all(
        &self,
        [sent, received]: [&Activation; 2],
        counts: [Vec<usize>; 2],
        name: &str,
    ) -> Result<(), DeviceError> {
        self.tracker.check_input()?;
        let [sent_counts, received_counts] = counts;
        let filled = |x: &Activation, counts: &[usize]| x.buffer().slice(0..counts.iter().sum());
        let into = filled(received, &received_counts);
        let parts = AllToAll {
            sent: filled(sent, &sent_counts),
            sent_counts,
            received_counts,
        };
        let launch = Launch::after(self.compute.record(), Traffic::Activations, name);
        let work = (self.tracker).launch(|| self.comm.all_to_all(&into, parts, launch));
        self.finish(Exchange::new(work.event().clone(), received))
            .map(drop)
    }

    /// The numbers, or `mean` for each where the device has no memory.
    fn numbers(&self, numbers: &Activation, mean: usize) -> Result<Vec<i32>, DeviceError> {
        match self.compute.download(numbers.buffer()) {
            Err(DeviceError::NotHost(_)) => Ok(vec![mean as i32; numbers.buffer().len()]),
            bytes => Ok(bytes?
                .chunks_exact(size_of::<i32>())
                .map(bytemuck::pod_read_unaligned)
                .collect()),
        }
    }
}

impl ExpertOps for RankGroup {
    fn count(
        &self,
        numbers: [&Activation; 2],
        [all, most]: [usize; 2],
    ) -> Result<[Vec<i32>; 2], DeviceError> {
        let (ranks, experts) = (self.comm.size(), numbers[0].buffer().len());
        let each = vec![experts / ranks; ranks];
        self.all_to_all(numbers, [each.clone(), each], "numbers of rows of experts")?;
        let [sent, received] = numbers.map(|numbers| self.numbers(numbers, all / experts));
        let (sent, received) = (sent?, received?);
        // What a failed exchange left there are no numbers.
        self.tracker.check_input()?;
        for (rows, rank) in received.chunks(received.len() / ranks).zip(self.comm.members()) {
            let sum: i64 = rows.iter().map(|&rows| i64::from(rows)).sum();
            if rows.iter().any(|&rows| rows < 0) || sum > most as i64 {
                let what =
                    format!("rank {rank} wants to send {rows:?} rows for experts, expected {most} at most");
                return Err(DeviceError::Upstream(what));
            }
        }
        Ok([sent, received])
    }

    fn exchange(&self, rows: [&Activation; 2], counts: [&[usize]; 2]) -> Result<(), DeviceError> {
        let channels = rows[0].shape()[1];
        let elements = |rows: &[usize]| rows.iter().map(|rows| rows * channels).collect();
        self.all_to_all(rows, counts.map(elements), "rows of experts")
    }
}
