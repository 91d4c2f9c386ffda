//! Operations with inputs, run on a device in f32 and bf16 and compared with the CPU device in f64.
//!
//! The reference starts from the same numbers, rounded to the device's storage, so that what differs is the arithmetic
//! and the rounding of results. It is in f32 where an operation must give the same bits everywhere, and where one takes
//! nothing else: the optimizer's state and the factor of clipping are f32 on every device.
#![allow(dead_code, reason = "each test binary uses its part")]

mod attention;
pub(crate) mod catalogue;
mod comparison;
mod experts;
pub(crate) mod matrix;
pub(crate) mod numbers;
mod parts;

pub(crate) use catalogue::{Size, catalogue};

use comparison::compare;
use ddp_worker::device::{ArenaSpec, Buffer, CpuDevice, DType, Device, DeviceError, Stream};
use ddp_worker::ops::Op;
use half::bf16;

/// What a tensor is, whatever the precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Activations and parameters.
    Act,
    /// Gradients of parameters.
    Grad,
    /// Always of this type.
    Fixed(DType),
}

/// Precision of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Types {
    pub(crate) act: DType,
    pub(crate) grad: DType,
}

impl Types {
    pub(crate) const ALL: [Self; 3] = [
        Self::F32,
        Self {
            act: DType::Bf16,
            grad: DType::Bf16,
        },
        Self {
            act: DType::Bf16,
            grad: DType::F32,
        },
    ];
    const F32: Self = Self {
        act: DType::F32,
        grad: DType::F32,
    };

    /// Of the reference: what comes of activations, such as losses, is then f64 too.
    const F64: Self = Self {
        act: DType::F64,
        grad: DType::F64,
    };

    fn of(self, kind: Kind) -> DType {
        match kind {
            Kind::Act => self.act,
            Kind::Grad => self.grad,
            Kind::Fixed(DType::F32) if self.act == DType::F64 => DType::F64,
            Kind::Fixed(dtype) => dtype,
        }
    }
}

/// One argument of an operation.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) kind: Kind,
    pub(crate) values: Vec<f64>,
    /// Elements of its arena before it.
    pub(crate) lead: usize,
    pub(crate) result: Outcome,
    /// Widths of what each of its rows consists of; empty: of one thing.
    row: Vec<usize>,
}

/// What the operation does to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Read only.
    Same,
    /// A result, the same bits.
    Exact,
    /// A result, up to the order of sums and rounding.
    Close,
    /// A result of products of what was rounded to the storage on the way, as the halves of attention are.
    Products,
    /// The same, of what was rounded to the storage of activations, whatever that of the result.
    Rounded,
}

impl Tensor {
    pub(crate) fn new(kind: Kind, values: Vec<f64>) -> Self {
        Self {
            kind,
            values,
            lead: 0,
            result: Outcome::Same,
            row: Vec::new(),
        }
    }

    pub(crate) fn result(self, result: Outcome) -> Self {
        Self { result, ..self }
    }

    /// Each section of a row, of so many elements, is compared by itself.
    fn of_sections(self, row: Vec<usize>) -> Self {
        Self { row, ..self }
    }

    /// The elements of each section, of `len` in all.
    fn sections(&self, len: usize) -> Vec<Vec<usize>> {
        let width = self.row.iter().sum::<usize>().max(1);
        let (mut sections, mut start) = (Vec::new(), 0);
        for section in &self.row {
            let columns = start..start + section;
            sections.push((0..len).filter(|i| columns.contains(&(i % width))).collect());
            start += section;
        }
        if sections.is_empty() {
            sections.push((0..len).collect());
        }
        sections
    }
}

/// An operation with its arguments.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) op: MakeOp,
}

/// A device and a stream of it, for as many cases as there are: a stream, with its scratch memory and its staging, is
/// never handed back.
pub(crate) struct Bench<'a> {
    device: &'a dyn Device,
    stream: Stream,
}

impl<'a> Bench<'a> {
    /// With a stream of its own.
    pub(crate) fn new(device: &'a dyn Device) -> Self {
        Self {
            stream: device.stream(),
            device,
        }
    }
}

/// Makes an operation of its tensors' buffers.
type MakeOp = Box<dyn Fn(&[Buffer]) -> Op + Send + Sync>;

impl Case {
    pub(crate) fn new<O: Into<Op>>(
        name: String,
        tensors: Vec<Tensor>,
        op: impl Fn(&[Buffer]) -> O + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            tensors,
            op: Box::new(move |buffers| op(buffers).into()),
        }
    }

    /// The same in memory that starts anywhere.
    pub(crate) fn shifted(mut self, lead: usize) -> Self {
        self.name = format!("{}, {lead} elements into the arenas", self.name);
        for tensor in &mut self.tensors {
            tensor.lead = lead;
        }
        self
    }

    /// Nothing is rounded on the way to a result.
    pub(crate) fn rounded_once(mut self) -> Self {
        for tensor in &mut self.tensors {
            if matches!(tensor.result, Outcome::Products | Outcome::Rounded) {
                tensor.result = Outcome::Close;
            }
        }
        self
    }

    /// Runs it; the values of all tensors afterwards.
    pub(crate) fn run(&self, bench: &Bench<'_>, types: Types) -> Result<Vec<Vec<f64>>, DeviceError> {
        self.run_on(bench, types, &self.tensors)
    }

    fn run_on(
        &self,
        bench: &Bench<'_>,
        types: Types,
        tensors: &[Tensor],
    ) -> Result<Vec<Vec<f64>>, DeviceError> {
        let &Bench { device, stream } = bench;
        let buffers = self.buffers(device, types)?;
        for (tensor, buffer) in tensors.iter().zip(&buffers) {
            device.upload(stream, buffer, &bytes(buffer.dtype(), &tensor.values));
        }
        device.enqueue(stream, (self.op)(&buffers));
        device.synchronize(stream)?;
        let download = |buffer| Ok(values(Buffer::dtype(buffer), &device.download(stream, buffer)?));
        buffers.iter().map(download).collect()
    }

    /// Memory for its tensors.
    fn buffers(&self, device: &dyn Device, types: Types) -> Result<Vec<Buffer>, DeviceError> {
        let buffers = self.tensors.iter().map(|tensor| {
            let len = tensor.values.len();
            let arena = device.alloc(&ArenaSpec::private(
                self.name.clone(),
                types.of(tensor.kind),
                tensor.lead + len,
            ))?;
            Ok(arena.slice(tensor.lead..tensor.lead + len))
        });
        buffers.collect()
    }

    /// The operation alone, in memory without values.
    pub(crate) fn operation(&self, device: &dyn Device, types: Types) -> Result<Op, DeviceError> {
        Ok((self.op)(&self.buffers(device, types)?))
    }

    /// Runs it on the device and on the CPU; an error says what differs.
    pub(crate) fn check(&self, bench: &Bench<'_>, types: Types) -> Result<(), String> {
        let name = format!("{} ({}, gradients {})", self.name, types.act, types.grad);
        let found = self
            .run(bench, types)
            .map_err(|error| format!("{name}: {error}"))?;
        let expected = self
            .reference(types)
            .map_err(|error| format!("{name}: on the CPU: {error}"))?;
        for (index, tensor) in self.tensors.iter().enumerate() {
            let dtype = match tensor.result {
                Outcome::Rounded => types.act,
                _ => types.of(tensor.kind),
            };
            compare(&expected[index], &found[index], tensor, dtype)
                .map_err(|difference| format!("{name}: argument {index}: {difference}"))?;
        }
        Ok(())
    }

    /// What the CPU makes of the tensors as they are stored in `types`.
    fn reference(&self, types: Types) -> Result<Vec<Vec<f64>>, DeviceError> {
        let cpu = CpuDevice::new(1)?;
        let stored: Vec<Tensor> = self.tensors.iter().map(|tensor| tensor.stored(types)).collect();
        let run = |wide| self.run_on(&Bench::new(&cpu), wide, &stored);
        let is_exact = stored.iter().any(|tensor| tensor.result == Outcome::Exact);
        let op = self.operation(&cpu, Types::F32)?;
        let takes_f32_alone = matches!(op, Op::Update(_) | Op::ClipScale(_));
        run(if is_exact || takes_f32_alone {
            Types::F32
        } else {
            Types::F64
        })
    }
}

impl Tensor {
    /// With the values that storage of these types leaves of it.
    fn stored(&self, types: Types) -> Self {
        let dtype = types.of(self.kind);
        Self {
            values: values(dtype, &bytes(dtype, &self.values)),
            ..self.clone()
        }
    }
}

fn bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    let each = values.iter();
    match dtype {
        DType::F64 => bytemuck::cast_slice(values).to_vec(),
        DType::F32 => each.flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        DType::Bf16 => each
            .flat_map(|x| bf16::from_f32(*x as f32).to_le_bytes())
            .collect(),
        DType::I32 => each.flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        DType::U8 => each.map(|x| *x as u8).collect(),
    }
}

fn values(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    fn read<T: bytemuck::AnyBitPattern>(bytes: &[u8], widen: impl Fn(T) -> f64) -> Vec<f64> {
        let each = bytes.chunks_exact(size_of::<T>());
        each.map(|bytes| widen(bytemuck::pod_read_unaligned(bytes)))
            .collect()
    }
    match dtype {
        DType::F64 => read(bytes, |x: f64| x),
        DType::F32 => read(bytes, |x: f32| f64::from(x)),
        DType::Bf16 => read(bytes, |x: bf16| f64::from(x)),
        DType::I32 => read(bytes, |x: i32| f64::from(x)),
        DType::U8 => read(bytes, |x: u8| f64::from(x)),
    }
}
