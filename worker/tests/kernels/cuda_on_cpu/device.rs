//! A device in host memory that carries out the plans of the CUDA kernels, thread by thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use ddp_worker::device::{Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, Stream};
use ddp_worker::ops::Op;
use ddp_worker::ops::cuda::{Arg, Call, Plan, plan};

use super::compiler::kernel;
use super::fenced::Fenced;

/// What scratch memory holds before the first kernel: NaN in every type.
const NOISE: u8 = 0xff;

/// Operations without a plan run on the CPU device.
pub(crate) struct Imitation {
    cpu: Arc<CpuDevice>,
    /// Orders of threads and blocks that every operation runs in; their results must agree.
    schedules: u32,
    planned: AtomicU32,
}

impl Imitation {
    pub(crate) fn new(schedules: u32) -> Self {
        Self {
            cpu: Arc::new(CpuDevice::new(1).unwrap()),
            schedules,
            planned: AtomicU32::new(0),
        }
    }

    /// Operations so far that were carried out by their kernels.
    pub(crate) fn planned(&self) -> u32 {
        self.planned.load(Ordering::Relaxed)
    }

    /// Runs the kernels of a plan in every order of threads; panics if the results differ.
    pub(crate) fn carry_out(&self, op: &str, plan: &Plan) -> Result<(), DeviceError> {
        self.planned.fetch_add(1, Ordering::Relaxed);
        let mut results: Vec<Vec<Vec<u8>>> = Vec::new();
        let mut buffers: Vec<Buffer> = Vec::new();
        for schedule in 0..self.schedules {
            let mut memory = Memory::of(plan)?;
            for call in &plan.calls {
                memory.run(call, schedule).map_err(|error| {
                    DeviceError::Upstream(format!("`{op}`, kernel `{}`: {error}", call.kernel))
                })?;
            }
            results.push(memory.results());
            buffers = memory.buffers.into_iter().map(|held| held.buffer).collect();
        }
        for (schedule, result) in results.iter().enumerate() {
            assert!(
                result == &results[0],
                "`{op}`: the order of threads {schedule} gives other bits"
            );
        }
        for (buffer, bytes) in buffers.iter().zip(&results[0]) {
            buffer.host_bytes_mut()?.copy_from_slice(bytes);
        }
        Ok(())
    }
}

/// Fenced copies of all that a plan touches.
struct Memory {
    buffers: Vec<HeldBuffer>,
    scratch: Fenced,
}

struct HeldBuffer {
    buffer: Buffer,
    copy: Fenced,
    before: Vec<u8>,
    written: bool,
}

impl Memory {
    fn of(plan: &Plan) -> Result<Self, DeviceError> {
        let mut buffers: Vec<HeldBuffer> = Vec::new();
        for arg in plan.calls.iter().flat_map(|call| &call.args) {
            let (Arg::Read(buffer) | Arg::Write(buffer)) = arg else {
                continue;
            };
            let written = matches!(arg, Arg::Write(_));
            if let Some(held) = buffers.iter_mut().find(|held| held.buffer.same(buffer)) {
                held.written |= written;
                continue;
            }
            let before = buffer.host_bytes()?.to_vec();
            let past = buffer.range().start * buffer.dtype().bytes();
            buffers.push(HeldBuffer {
                copy: Fenced::new(&before, past),
                buffer: buffer.clone(),
                before,
                written,
            });
        }
        Ok(Self {
            buffers,
            scratch: Fenced::new(&vec![NOISE; plan.scratch_bytes], 0),
        })
    }

    fn run(&mut self, call: &Call, schedule: u32) -> Result<(), String> {
        let kernel = kernel(call);
        let kernel = kernel.get().expect("compiled");
        let sizes = kernel.parameters();
        assert_eq!(sizes.len(), call.args.len(), "arguments of `{}`", call.kernel);
        let mut values: Vec<Vec<u64>> = Vec::new();
        for (index, (arg, size)) in call.args.iter().zip(sizes).enumerate() {
            let (value, bytes) = match arg {
                Arg::Read(buffer) | Arg::Write(buffer) => {
                    let held = self.buffers.iter().find(|held| held.buffer.same(buffer));
                    (vec![held.expect("held").copy.address()], 8)
                }
                Arg::Scratch(offset) => (vec![self.scratch.address() + *offset as u64], 8),
                Arg::Null => (vec![0], 8),
                Arg::U32(value) => (vec![u64::from(*value)], 4),
                Arg::U64(value) => (vec![*value], 8),
                Arg::F32(value) => (vec![u64::from(value.to_bits())], 4),
                Arg::Table(values) => (values.clone(), 8 * values.len()),
            };
            assert_eq!(size, bytes, "size of argument {index} of `{}`", call.kernel);
            values.push(value);
        }
        kernel.launch(&mut values, call, schedule)
    }

    /// The bytes of every buffer, after checks that only what is said to be written was.
    fn results(&mut self) -> Vec<Vec<u8>> {
        self.scratch.contents("scratch memory");
        let contents = self.buffers.iter_mut().map(|held| {
            let name = format!("{:?}", held.buffer);
            let after = held.copy.contents(&name).to_vec();
            assert!(
                held.written || after == held.before,
                "{name} is only read, and was written"
            );
            after
        });
        contents.collect()
    }
}

impl Device for Imitation {
    fn name(&self) -> String {
        "CUDA kernels on the CPU".to_owned()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        self.cpu.alloc(spec)
    }

    fn stream(&self) -> Stream {
        self.cpu.stream()
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        match plan(&op) {
            None => self.cpu.enqueue(stream, op),
            Some(plan) => {
                let outcome = plan.and_then(|plan| self.carry_out(op.name(), &plan));
                if let Err(error) = outcome {
                    let (event, signal) = Event::pair(op.name());
                    signal.set(Err(error));
                    self.cpu.wait_event(stream, &event, Instant::now());
                }
            }
        }
    }

    fn record(&self, stream: Stream) -> Event {
        self.cpu.record(stream)
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        self.cpu.wait_event(stream, event, deadline);
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.cpu.synchronize(stream)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.cpu.upload(stream, dst, bytes);
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.cpu.download(stream, src)
    }
}
