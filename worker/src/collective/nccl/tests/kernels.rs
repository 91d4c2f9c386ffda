//! What the fake library does on a stream: ranks meet, the last one to come computes for all.
#![allow(unsafe_code, reason = "elements at addresses, as a library is given them")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use half::bf16;

use crate::collective::nccl::sys::{DataType, RedOp};

/// One rank's part of an operation; addresses as numbers, since threads pass them on.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) kind: Kind,
    pub(super) source: usize,
    pub(super) target: usize,
    pub(super) count: usize,
    pub(super) dtype: DataType,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// The factor of a pre-multiplied sum, if it is one.
    AllReduce(RedOp, Option<f64>),
    ReduceScatter(RedOp, Option<f64>),
    AllGather,
    Broadcast(usize),
    Send,
    Recv,
}

/// Where parts of the same operation meet.
#[derive(Default)]
pub(super) struct Arena {
    meetings: Mutex<HashMap<String, Meeting>>,
    changed: Condvar,
}

#[derive(Default)]
struct Meeting {
    parts: HashMap<usize, (Part, Arc<AtomicBool>)>,
    complete: bool,
}

impl Arena {
    /// Brings a part to a meeting of `size` and waits until all have come. Without result if a rank is aborted: its
    /// memory may be gone.
    fn attend(&self, key: &str, place: usize, size: usize, part: Part, aborted: &Arc<AtomicBool>) {
        let mut meetings = self.meetings.lock().unwrap();
        let meeting = meetings.entry(key.to_owned()).or_default();
        meeting.parts.insert(place, (part, aborted.clone()));
        let present = meeting.parts.values();
        if present
            .filter(|(_, aborted)| !aborted.load(Ordering::Acquire))
            .count()
            == size
        {
            let parts: Vec<Part> = (0..size).map(|place| meeting.parts[&place].0.clone()).collect();
            compute(&parts);
            meeting.complete = true;
            self.changed.notify_all();
            return;
        }
        while !aborted.load(Ordering::Acquire) && !meetings[key].complete {
            meetings = self.changed.wait(meetings).unwrap();
        }
    }

    /// Aborts a rank: from now on nobody touches its memory.
    pub(super) fn abort(&self, aborted: &AtomicBool) {
        let _meetings = self.meetings.lock().unwrap();
        aborted.store(true, Ordering::Release);
        self.changed.notify_all();
    }
}

/// What runs on a stream for one rank.
pub(super) struct Launch {
    pub(super) arena: Arc<Arena>,
    pub(super) key: String,
    pub(super) place: usize,
    pub(super) size: usize,
    pub(super) part: Part,
    pub(super) aborted: Arc<AtomicBool>,
}

impl Launch {
    pub(super) fn run(self) {
        let Self {
            arena,
            key,
            place,
            size,
            part,
            aborted,
        } = self;
        arena.attend(&key, place, size, part, &aborted);
    }
}

fn compute(parts: &[Part]) {
    let kinds: Vec<Kind> = parts.iter().map(|part| part.kind).collect();
    match kinds[0] {
        Kind::AllReduce(op, _) => {
            let result = reduced(parts, op, parts[0].count);
            for part in parts {
                put(part, &result);
            }
        }
        Kind::ReduceScatter(op, _) => {
            let result = reduced(parts, op, parts[0].count * parts.len());
            for (part, slice) in parts.iter().zip(result.chunks(parts[0].count)) {
                put(part, slice);
            }
        }
        Kind::AllGather => {
            let all: Vec<u8> = parts.iter().flat_map(|part| bytes(part, part.count)).collect();
            for part in parts {
                put_bytes(part, &all);
            }
        }
        Kind::Broadcast(root) => {
            let all = bytes(&parts[root], parts[root].count);
            for part in parts {
                put_bytes(part, &all);
            }
        }
        // The sender is the first of two.
        Kind::Send => put_bytes(&parts[1], &bytes(&parts[0], parts[0].count)),
        Kind::Recv => unreachable!("a receiver is the second of two"),
    }
}

fn reduced(parts: &[Part], op: RedOp, len: usize) -> Vec<f64> {
    let mut inputs = parts.iter().map(|part| {
        let factor = match part.kind {
            Kind::AllReduce(_, factor) | Kind::ReduceScatter(_, factor) => factor.unwrap_or(1.0),
            _ => panic!("ranks are in different operations: {parts:?}"),
        };
        let numbers: Vec<f64> = bytes(part, len)
            .chunks(width(part.dtype))
            .map(|raw| number(raw, part.dtype) * factor)
            .collect();
        numbers
    });
    let first = inputs.next().unwrap();
    let mut result = inputs.fold(first, |mut sum, input| {
        for (sum, x) in sum.iter_mut().zip(input) {
            *sum = if op == RedOp::MAX { sum.max(x) } else { *sum + x };
        }
        sum
    });
    if op == RedOp::AVG {
        for sum in &mut result {
            *sum /= parts.len() as f64;
        }
    }
    result
}

fn width(dtype: DataType) -> usize {
    match dtype {
        DataType::UINT8 => 1,
        DataType::BFLOAT16 => 2,
        DataType::INT32 | DataType::FLOAT32 => 4,
        _ => 8,
    }
}

pub(super) fn number(raw: &[u8], dtype: DataType) -> f64 {
    match dtype {
        DataType::UINT8 => f64::from(raw[0]),
        DataType::BFLOAT16 => bf16::from_ne_bytes(raw.try_into().unwrap()).to_f64(),
        DataType::INT32 => f64::from(i32::from_ne_bytes(raw.try_into().unwrap())),
        DataType::FLOAT32 => f64::from(f32::from_ne_bytes(raw.try_into().unwrap())),
        _ => f64::from_ne_bytes(raw.try_into().unwrap()),
    }
}

fn put(part: &Part, numbers: &[f64]) {
    let raw: Vec<u8> = numbers
        .iter()
        .flat_map(|x| match part.dtype {
            DataType::UINT8 => vec![*x as u8],
            DataType::BFLOAT16 => bf16::from_f64(*x).to_ne_bytes().to_vec(),
            DataType::INT32 => (*x as i32).to_ne_bytes().to_vec(),
            DataType::FLOAT32 => (*x as f32).to_ne_bytes().to_vec(),
            _ => x.to_ne_bytes().to_vec(),
        })
        .collect();
    put_bytes(part, &raw);
}

fn bytes(part: &Part, len: usize) -> Vec<u8> {
    let len = len * width(part.dtype);
    // SAFETY: the caller of the library vouched for so many elements, and waits for this.
    unsafe { std::slice::from_raw_parts(part.source as *const u8, len) }.to_vec()
}

fn put_bytes(part: &Part, raw: &[u8]) {
    // SAFETY: as above; nobody else accesses them meanwhile.
    unsafe { std::slice::from_raw_parts_mut(part.target as *mut u8, raw.len()) }.copy_from_slice(raw);
}
