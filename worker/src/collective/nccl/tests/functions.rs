//! Functions with the signatures of NCCL's, over the fake world.
#![allow(unsafe_code, reason = "functions of a C library, played")]

use std::ffi::{c_char, c_int, c_void};

use super::fake::{BROKEN, Background, CURRENT, FakeComm, Kind, Part, WORLDS};
use crate::collective::nccl::library::{
    Config, DataType, Functions, RawComm, RawStream, RedOp, Status, UNIQUE_ID_BYTES, UniqueId,
};

/// # Safety
/// A communicator of this fake; they are never freed.
unsafe fn comm<'a>(raw: RawComm) -> &'a FakeComm {
    // SAFETY: the caller's promise.
    unsafe { &*raw.cast_const().cast::<FakeComm>() }
}

/// The table. `version` is what it says of itself.
pub(super) fn functions(version: unsafe extern "C" fn(*mut c_int) -> Status) -> Functions {
    Functions {
        get_version: version,
        get_unique_id,
        comm_init,
        comm_get_async_error,
        comm_split,
        comm_abort,
        comm_finalize,
        comm_destroy,
        all_reduce,
        reduce_scatter,
        all_gather,
        broadcast,
        send,
        recv,
        get_error_string,
        get_last_error,
    }
}

/// 2.21.5
pub(super) unsafe extern "C" fn version(out: *mut c_int) -> Status {
    // SAFETY: as with the function that this one plays.
    unsafe { *out = 22_105 };
    Status::SUCCESS
}

/// 2.17.1
pub(super) unsafe extern "C" fn old_version(out: *mut c_int) -> Status {
    // SAFETY: as with the function that this one plays.
    unsafe { *out = 21_701 };
    Status::SUCCESS
}

unsafe extern "C" fn get_unique_id(out: *mut UniqueId) -> Status {
    let world = CURRENT
        .with_borrow(Clone::clone)
        .expect("the thread has entered a world");
    let mut worlds = WORLDS.lock().unwrap();
    worlds.push(world);
    let mut id = [0; UNIQUE_ID_BYTES];
    id[..8].copy_from_slice(&(worlds.len() - 1).to_ne_bytes());
    // SAFETY: as with the function that this one plays.
    unsafe { *out = UniqueId(id) };
    Status::SUCCESS
}

unsafe extern "C" fn comm_init(
    out: *mut RawComm,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> Status {
    let number = usize::from_ne_bytes(id.0[..8].try_into().unwrap());
    let world = WORLDS.lock().unwrap()[number].clone();
    // SAFETY: as with the function that this one plays.
    if unsafe { (*config).blocking } != 0 {
        world.violation("a communicator that blocks".into());
    }
    let (rank, size) = (rank as usize, size as usize);
    let made = FakeComm::new(&world, "world".into(), rank, size, rank);
    made.inner.lock().unwrap().background = Some(Background::RollCall("init".into()));
    world.say("init", rank, (0, 0));
    // SAFETY: as above.
    unsafe { *out = made.into_raw() };
    Status::IN_PROGRESS
}

unsafe extern "C" fn comm_get_async_error(raw: RawComm, out: *mut Status) -> Status {
    // SAFETY: as with the function that this one plays, here and below.
    let comm = unsafe { comm(raw) };
    comm.call("ncclCommGetAsyncError", |inner| {
        // SAFETY: as above.
        unsafe { *out = comm.progress(inner) };
        Status::SUCCESS
    })
}

unsafe extern "C" fn comm_split(
    raw: RawComm,
    color: c_int,
    key: c_int,
    out: *mut RawComm,
    _: *mut Config,
) -> Status {
    // SAFETY: as above.
    let comm = unsafe { comm(raw) };
    comm.ask("ncclCommSplit", |inner| {
        inner.splits += 1;
        let roll_call = format!("{}/split {}", comm.group, inner.splits);
        comm.world.say(&roll_call, comm.rank, (color, key));
        inner.background = Some(Background::Split(roll_call, out as usize));
        Status::IN_PROGRESS
    })
}

unsafe extern "C" fn comm_abort(raw: RawComm) -> Status {
    // SAFETY: as above.
    let comm = unsafe { comm(raw) };
    comm.expect_device("ncclCommAbort");
    let status = comm.call("ncclCommAbort", |_| {
        comm.world.block_an_abort(comm.global);
        comm.world.arena.abort(&comm.aborted);
        comm.world.free_memory(comm.global);
        comm.world.log.lock().unwrap().aborted += 1;
        Status::SUCCESS
    });
    comm.free();
    status
}

unsafe extern "C" fn comm_finalize(raw: RawComm) -> Status {
    // SAFETY: as above.
    let comm = unsafe { comm(raw) };
    comm.ask("ncclCommFinalize", |inner| {
        let roll_call = format!("{}/finalize", comm.group);
        comm.world.say(&roll_call, comm.rank, (0, 0));
        inner.background = Some(Background::RollCall(roll_call));
        Status::IN_PROGRESS
    })
}

unsafe extern "C" fn comm_destroy(raw: RawComm) -> Status {
    // SAFETY: as above.
    let comm = unsafe { comm(raw) };
    let status = comm.ask("ncclCommDestroy", |_| {
        let mut log = comm.world.log.lock().unwrap();
        log.destroyed += 1;
        Status::SUCCESS
    });
    comm.free();
    status
}

fn part(kind: Kind, source: *const c_void, target: *mut c_void, count: usize, dtype: DataType) -> Part {
    Part {
        kind,
        source: source as usize,
        target: target as usize,
        count,
        dtype,
    }
}

unsafe extern "C" fn all_reduce(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: DataType,
    op: RedOp,
    raw: RawComm,
    stream: RawStream,
) -> Status {
    // SAFETY: as above.
    unsafe { comm(raw) }.collective("ncclAllReduce", stream, |_| {
        let kind = Kind::AllReduce(op);
        part(kind, source, target, count, dtype)
    })
}

unsafe extern "C" fn reduce_scatter(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: DataType,
    op: RedOp,
    raw: RawComm,
    stream: RawStream,
) -> Status {
    // SAFETY: as above.
    unsafe { comm(raw) }.collective("ncclReduceScatter", stream, |_| {
        let kind = Kind::ReduceScatter(op);
        part(kind, source, target, count, dtype)
    })
}

unsafe extern "C" fn all_gather(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: DataType,
    raw: RawComm,
    stream: RawStream,
) -> Status {
    // SAFETY: as above.
    unsafe { comm(raw) }.collective("ncclAllGather", stream, |_| {
        part(Kind::AllGather, source, target, count, dtype)
    })
}

unsafe extern "C" fn broadcast(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: DataType,
    root: c_int,
    raw: RawComm,
    stream: RawStream,
) -> Status {
    // SAFETY: as above.
    unsafe { comm(raw) }.collective("ncclBroadcast", stream, |_| {
        part(Kind::Broadcast(root as usize), source, target, count, dtype)
    })
}

unsafe extern "C" fn send(
    source: *const c_void,
    count: usize,
    dtype: DataType,
    to: c_int,
    raw: RawComm,
    stream: RawStream,
) -> Status {
    // SAFETY: as above.
    let comm = unsafe { comm(raw) };
    comm.message(
        stream,
        comm.rank,
        to as usize,
        part(Kind::Send, source, std::ptr::null_mut(), count, dtype),
    )
}

unsafe extern "C" fn recv(
    target: *mut c_void,
    count: usize,
    dtype: DataType,
    from: c_int,
    raw: RawComm,
    stream: RawStream,
) -> Status {
    // SAFETY: as above.
    let comm = unsafe { comm(raw) };
    comm.message(
        stream,
        from as usize,
        comm.rank,
        part(Kind::Recv, std::ptr::null(), target, count, dtype),
    )
}

unsafe extern "C" fn get_error_string(status: Status) -> *const c_char {
    match status {
        Status::REMOTE_ERROR => c"remote process exited or there was a network error",
        BROKEN => c"internal error",
        _ => c"invalid argument",
    }
    .as_ptr()
}

unsafe extern "C" fn get_last_error(_: RawComm) -> *const c_char {
    c"injected\nby a test".as_ptr()
}
