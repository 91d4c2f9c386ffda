//! Optimizer state in memory of the host, beside a device with memory of its own (ZeRO-Offload, Ren et al. 2021):
//! state and masters never cross. An update brings gradients to the host piece by piece, updates there, and takes the
//! parameters back; pieces overlap, and the host goes on meanwhile ([`HostPipeline`]).
//!
//! An update is element by element, and the kernel is the processor's: the numbers are those of a run without a device.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::{
    Arena, ArenaSpec, Buffer, CpuDevice, DType, Device, DeviceError, HostMemory, HostPass, HostPipeline,
    Stream, copy_same_length,
};
use crate::ops::{Cast, HostUpdate, Op, Update, cast_bytes};

/// State on the host. What touches it is done by the processor, in the order of the stream.
pub struct HostState {
    host: Arc<CpuDevice>,
    pipeline: HostPipeline,
    piece: usize,
    state: Mutex<Vec<Arena>>,
}

impl HostState {
    /// With so many threads for updates, in pieces of so many elements. None over a device whose memory is the host's:
    /// its state is there already.
    pub(super) fn new(
        device: &Arc<dyn Device>,
        threads: usize,
        piece: usize,
    ) -> Result<Option<Self>, DeviceError> {
        // The largest pass brings gradients and a factor in f32, and takes parameters in f32.
        let slot = 2 * piece * size_of::<f32>() + 4096;
        let Some(pipeline) = HostPipeline::new(device, slot)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            host: Arc::new(CpuDevice::new(threads)?),
            pipeline,
            piece,
            state: Mutex::default(),
        }))
    }

    /// Page-locked memory of the host through which pieces go.
    #[must_use]
    pub const fn staging_bytes(&self) -> usize {
        self.pipeline.staging_bytes()
    }

    /// Threads that update.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.host.cpu().threads()
    }

    /// All of it is there on return.
    pub(super) fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        HostMemory::check_room(&spec.name, spec.bytes(), 1)?;
        let arena = self.host.alloc(spec)?;
        // The system gives the pages now, not in the middle of the first step.
        arena.whole().host_bytes_mut()?.fill(0);
        self.state().push(arena.clone());
        Ok(arena)
    }

    /// Puts operations that touch the state on the stream, others on that of the device. Updates that are given together
    /// overlap, and share passes where they are neighbours.
    pub(super) fn enqueue_all(&self, device: &dyn Device, stream: Stream, ops: Vec<Op>) {
        let (mut updates, mut passes) = (Vec::new(), Vec::new());
        for op in ops {
            match op {
                Op::Update(op) if self.holds(&op.param) => updates.push(op),
                Op::Cast(op) if self.holds(&op.x) || self.holds(&op.out) => {
                    passes.append(&mut self.convert(&op));
                }
                other => device.enqueue(stream, other),
            }
        }
        let pieces = Piece::all(&updates, self.piece).into_iter();
        passes.extend(pieces.map(|piece| piece.pass(&self.host)));
        self.pipeline.run(stream, passes);
    }

    /// Puts a copy of `bytes` into a part of the state, in stream order.
    pub(super) fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        let (state, bytes) = (dst.clone(), bytes.to_vec());
        let pass = HostPass {
            inputs: Vec::new(),
            outputs: Vec::new(),
            work: Box::new(move |_, _| copy_same_length(&bytes, &mut state.host_bytes_mut()?)),
        };
        self.pipeline.run(stream, vec![pass]);
    }

    /// The first error of what was put on any stream.
    pub(super) fn failure(&self) -> Result<(), DeviceError> {
        self.pipeline.failure()
    }

    /// True if this was allocated here.
    pub(super) fn holds(&self, buffer: &Buffer) -> bool {
        self.state().iter().any(|arena| arena.same(buffer.arena()))
    }

    fn state(&self) -> MutexGuard<'_, Vec<Arena>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The passes of a conversion between state and memory of the device.
    fn convert(&self, op: &Cast) -> Vec<HostPass> {
        let starts = (0..op.x.len()).step_by(self.piece);
        let ranges = starts.map(|start| start..op.x.len().min(start + self.piece));
        ranges
            .map(|range| self.convert_piece(&op.x.slice(range.clone()), &op.out.slice(range)))
            .collect()
    }

    fn convert_piece(&self, x: &Buffer, out: &Buffer) -> HostPass {
        let host = self.host.clone();
        let (from, to) = (x.dtype(), out.dtype());
        if self.holds(x) {
            let state = x.clone();
            return HostPass {
                inputs: Vec::new(),
                outputs: vec![out.clone()],
                work: Box::new(move |_, written| {
                    cast_bytes(
                        host.cpu(),
                        (from, &state.host_bytes()?[..]),
                        (to, &mut *written[0]),
                    )
                }),
            };
        }
        let state = out.clone();
        HostPass {
            inputs: vec![x.clone()],
            outputs: Vec::new(),
            work: Box::new(move |read, _| {
                cast_bytes(
                    host.cpu(),
                    (from, read[0]),
                    (to, &mut state.host_bytes_mut()?[..]),
                )
            }),
        }
    }
}

/// Elements that lie side by side in gradients, parameters and state, and the updates of parts of them.
struct Piece {
    grad: Buffer,
    /// The masters.
    param: Buffer,
    copy: Buffer,
    updates: Vec<(Range<usize>, Update)>,
}

impl Piece {
    /// Joins updates up to `most` elements, and cuts longer ones. Between two that are joined lies padding.
    fn all(ops: &[Update], most: usize) -> Vec<Self> {
        let mut pieces: Vec<Self> = Vec::new();
        for op in ops {
            let mut start = 0;
            while start < op.param.len() {
                let room = pieces.last().and_then(|piece| piece.room_for(op, start, most));
                let end = op.param.len().min(start + room.unwrap_or(most));
                let update = op.slice(&(start..end));
                match (room, pieces.last_mut()) {
                    (Some(_), Some(piece)) => piece.join(update),
                    _ => pieces.push(Self::of(update)),
                }
                start = end;
            }
        }
        pieces
    }

    fn of(update: Update) -> Self {
        Self {
            grad: update.grad.clone(),
            param: update.param.clone(),
            copy: target(&update).clone(),
            updates: vec![(0..update.param.len(), update)],
        }
    }

    /// How many elements of `op`, from its element `start` on, can join. None if it does not follow with the same
    /// distance everywhere; if it does, what lies between belongs to no parameter.
    fn room_for(&self, op: &Update, start: usize, most: usize) -> Option<usize> {
        let pairs = [
            (&self.grad, &op.grad),
            (&self.param, &op.param),
            (&self.copy, target(op)),
        ];
        let mut gaps = pairs.iter().map(|(own, next)| {
            let gap = (next.range().start + start).checked_sub(own.range().end);
            gap.filter(|_| own.arena().same(next.arena()))
        });
        let gap = gaps.next()??;
        let scale = &self.updates[0].1.scale;
        let follows = gaps.all(|other| other == Some(gap)) && scale.arena().same(op.scale.arena());
        let room = most.checked_sub(self.param.len() + gap)?;
        (follows && room > 0).then_some(room)
    }

    fn join(&mut self, update: Update) {
        let start = update.param.range().start - self.param.range().start;
        let end = start + update.param.len();
        for buffer in [&mut self.grad, &mut self.param, &mut self.copy] {
            let first = buffer.range().start;
            *buffer = buffer.arena().slice(first..first + end);
        }
        self.updates.push((start..end, update));
    }

    /// The last operation reads all masters of the piece: where an update is skipped, and between two, parameters
    /// become what they are.
    fn pass(self, host: &Arc<CpuDevice>) -> HostPass {
        let Self {
            grad,
            param,
            copy,
            updates,
        } = self;
        let host = host.clone();
        let (each, to) = (grad.dtype().bytes(), copy.dtype());
        let scale = updates[0].1.scale.clone();
        // The closure keeps no memory of the device: a thread of the driver drops it.
        let updates: Vec<(Range<usize>, HostUpdate)> = updates
            .into_iter()
            .map(|(range, update)| (range, update.on_host()))
            .collect();
        HostPass {
            inputs: vec![grad, scale],
            outputs: vec![copy],
            work: Box::new(move |read, written| {
                let scale = read[1].chunks_exact(size_of::<f32>());
                let scale: Vec<f32> = scale.map(bytemuck::pod_read_unaligned).collect();
                for (range, update) in &updates {
                    update.run(host.cpu(), &read[0][range.start * each..range.end * each], &scale)?;
                }
                cast_bytes(
                    host.cpu(),
                    (DType::F32, &param.host_bytes()?[..]),
                    (to, &mut *written[0]),
                )
            }),
        }
    }
}

/// The parameters that an update leaves on the device.
fn target(op: &Update) -> &Buffer {
    op.copy.as_ref().expect("state on the host has masters")
}
