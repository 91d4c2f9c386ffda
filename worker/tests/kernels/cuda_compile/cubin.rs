//! What a compiled kernel says of itself: registers, shared and local memory, threads, parameters.
//!
//! A CUBIN is an ELF file. Of each kernel it has a section `.nv.info.NAME`, and of all together `.nv.info`: lists of
//! attributes, each a byte for the form of its value, a byte for its number, and the value. The numbers are those that
//! NVIDIA's own `cuobjdump` names `EIATTR_…`; code of NVRTC 12 and 13 has the same.

use std::collections::BTreeMap;

use ddp_worker::cuda::Cubin;
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol, SymbolIndex};

/// `EIATTR_MAX_THREADS`: of `__launch_bounds__`, in x, y, z.
const MAX_THREADS: u8 = 0x05;
/// `EIATTR_FRAME_SIZE`: of all kernels; symbol, bytes.
const FRAME_BYTES: u8 = 0x11;
/// `EIATTR_KPARAM_INFO`: one parameter; its place in the list, its offset, its size.
const PARAMETER: u8 = 0x17;
/// `EIATTR_REGCOUNT`: of all kernels; symbol, registers.
const REGISTERS: u8 = 0x2f;

/// Form of a value that says its own length.
const SIZED: u8 = 4;

/// What a kernel needs, whatever it is launched with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    /// Of a thread.
    pub(crate) registers: u32,
    /// Bytes of local memory of a thread: arrays that are not in registers, and registers that were spilled.
    pub(crate) local_bytes: u32,
    /// Bytes of shared memory that it declares with their size. From sm_90 on with those that the system has of each block.
    pub(crate) shared_bytes: usize,
    /// Threads of a block that it was compiled for at most.
    pub(crate) max_threads: u64,
    /// Sizes in bytes of its parameters, in order.
    pub(crate) parameters: Vec<usize>,
}

/// The kernels of a CUBIN by name.
pub(crate) fn kernels(cubin: &Cubin) -> BTreeMap<String, Resources> {
    let file = ElfFile64::<object::Endianness>::parse(cubin.0.as_slice()).expect("a CUBIN is an ELF file");
    let mut found: BTreeMap<String, Resources> = BTreeMap::new();
    for section in file.sections() {
        let name = section.name().expect("a name");
        if let Some(kernel) = name.strip_prefix(".nv.info.") {
            let of_kernel = found.entry(kernel.to_owned()).or_default();
            of_one(of_kernel, section.data().expect("contents"));
        } else if name == ".nv.info" {
            let kernel_of = |value: &[u8]| {
                let symbol = SymbolIndex(u32_at(value, 0) as usize);
                let symbol = file.symbol_by_index(symbol).expect("a symbol");
                symbol.name().expect("a name").to_owned()
            };
            for (attribute, value) in attributes(section.data().expect("contents")) {
                match attribute {
                    REGISTERS => found.entry(kernel_of(value)).or_default().registers = u32_at(value, 4),
                    FRAME_BYTES => found.entry(kernel_of(value)).or_default().local_bytes = u32_at(value, 4),
                    _ => {}
                }
            }
        } else if let Some(kernel) = name.strip_prefix(".nv.shared.")
            && !kernel.starts_with("reserved.")
        {
            found.entry(kernel.to_owned()).or_default().shared_bytes = section.size() as usize;
        }
    }
    found
}

fn of_one(kernel: &mut Resources, info: &[u8]) {
    let mut parameters = BTreeMap::new();
    for (attribute, value) in attributes(info) {
        match attribute {
            MAX_THREADS => {
                kernel.max_threads = value
                    .chunks_exact(4)
                    .map(|axis| u64::from(u32_at(axis, 0)))
                    .product();
            }
            PARAMETER => {
                let place = u16::from_le_bytes([value[4], value[5]]);
                // Below the size are 18 bits of where it lies.
                parameters.insert(place, (u32_at(value, 8) >> 18) as usize);
            }
            _ => {}
        }
    }
    kernel.parameters = parameters.into_values().collect();
}

/// Numbers and values of a list of attributes.
fn attributes(mut info: &[u8]) -> Vec<(u8, &[u8])> {
    let mut found = Vec::new();
    while let [form, attribute, low, high, rest @ ..] = info {
        let bytes = usize::from(u16::from_le_bytes([*low, *high]));
        if *form == SIZED {
            let (value, rest) = rest.split_at(bytes);
            found.push((*attribute, value));
            info = rest;
        } else {
            found.push((*attribute, &info[2..4]));
            info = rest;
        }
    }
    assert!(info.is_empty(), "{} bytes after the last attribute", info.len());
    found
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
