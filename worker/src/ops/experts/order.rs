//! The order of rows at the experts: by expert, then by the rank that they come from, then by their position there. So the
//! sums over an expert's rows do not depend on which rank has the expert.

use super::super::cuda::plan::{Call, Plan, Scratch, THREADS, count, expect_dtype, kernels};
use super::super::{Cpu, Operation, expect_indices, expect_lens};
use crate::cuda::{Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

/// Orders the slots of this rank by expert, stably. All buffers hold i32.
#[derive(Clone, Debug)]
pub struct SortByExpert {
    /// `[R, K]`: the expert of each slot
    pub experts: Buffer,
    /// Most rows of an expert. Further slots, those of the last positions, are dropped.
    pub capacity: usize,
    /// `[E]`: rows of each expert
    pub counts: Buffer,
    /// `[E + 1]`: the first row of each expert, and behind the last row
    pub offsets: Buffer,
    /// `[M]`: the slot of each row; −1 behind the last row. Has room for all slots that can be kept.
    pub slots: Buffer,
    /// `[R, K]`: the row of each slot; −1 if it was dropped
    pub rows: Buffer,
}

impl Operation for SortByExpert {
    const NAME: &'static str = "sort_by_expert";

    fn run(&self, _: &Cpu) -> Result<(), DeviceError> {
        let capacity = self.check()?;
        let (experts, mut counts) = (self.experts.host::<i32>()?, self.counts.host_mut::<i32>()?);
        expect_indices(Self::NAME, "experts", &experts, 0, counts.len())?;
        let (mut slots, mut rows) = (self.slots.host_mut::<i32>()?, self.rows.host_mut::<i32>()?);
        let mut offsets = self.offsets.host_mut::<i32>()?;
        counts.fill(0);
        // First each slot's place among the rows of its expert.
        for (row, &expert) in rows.iter_mut().zip(&*experts) {
            let count = &mut counts[expert as usize];
            *row = if *count < capacity { *count } else { -1 };
            *count = capacity.min(*count + 1);
        }
        offsets[0] = 0;
        for (expert, count) in counts.iter().enumerate() {
            offsets[expert + 1] = offsets[expert] + count;
        }
        slots.fill(-1);
        for (slot, (row, &expert)) in rows.iter_mut().zip(&*experts).enumerate() {
            if *row >= 0 {
                *row += offsets[expert as usize];
                slots[*row as usize] = slot as i32;
            }
        }
        Ok(())
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        let (op, capacity) = (Self::NAME, self.check()? as u32);
        let written = [&self.counts, &self.offsets, &self.slots, &self.rows];
        self.experts.expect_dtype(DType::I32)?;
        expect_dtype(DType::I32, &written)?;
        let [slots, rows] = [self.rows.len() as u32, count(op, "rows", self.slots.len())?];
        // The last block of the second: what lies behind the last row.
        let experts = self.counts.len() as u32;
        let calls = [("sort_counts", experts), ("sort_rows", experts + 1)].map(|(kernel, blocks)| {
            let call = Call::new(&SOURCE, kernel, Vec::new(), Grid::linear(blocks, THREADS));
            let call = call.read([&self.experts]).write(written);
            call.u32([slots, rows, capacity])
        });
        Ok(Scratch::default().plan(calls.into()))
    }
}

impl SortByExpert {
    /// Refuses sizes that do not fit each other; the capacity of an expert.
    fn check(&self) -> Result<i32, DeviceError> {
        let (experts, slots) = (self.counts.len(), self.rows.len());
        let capacity = self.capacity.min(slots);
        let room = self.slots.len().max(slots.min(experts.saturating_mul(capacity)));
        let sizes = [
            ("experts", &self.experts, slots),
            ("offsets", &self.offsets, experts + 1),
            ("slots", &self.slots, room),
        ];
        expect_lens(Self::NAME, &sizes)?;
        count(Self::NAME, "slots", slots).map(|_| capacity as i32)
    }
}

/// The order of rows that came from all ranks, each rank's in order of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergedOrder {
    /// The first row of each expert, and behind the last row.
    pub offsets: Vec<i32>,
    /// The received row that each row is.
    pub received: Vec<i32>,
}

impl MergedOrder {
    /// Of `counts[rank · experts + expert]` rows that each rank sent for each expert of this rank.
    pub fn new(counts: &[i32], experts: usize) -> Self {
        let mut first = vec![0];
        first.extend(counts.iter().scan(0, |sum, rows| {
            *sum += (*rows).max(0);
            Some(*sum)
        }));
        let (mut offsets, mut received) = (vec![0], Vec::new());
        for expert in 0..experts {
            for run in (expert..counts.len()).step_by(experts) {
                received.extend(first[run]..first[run + 1]);
            }
            offsets.push(received.len() as i32);
        }
        Self { offsets, received }
    }
}

/// Where each number from 0 on stands in an order of them all.
pub fn inverse(order: &[i32]) -> Vec<i32> {
    let mut places = vec![0; order.len()];
    for (place, &number) in order.iter().enumerate() {
        places[number as usize] = place as i32;
    }
    places
}

static SOURCE: KernelSource = kernels("expert_order.cu", include_str!("../cuda/expert_order.cu"));
