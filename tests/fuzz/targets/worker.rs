//! What other ranks send to a worker.

use ddp_worker::fuzzing::{read_foreign, read_foreign_id};

use crate::runner::Target;

pub(crate) fn data_plane() -> Target {
    let header: Vec<u8> = [
        &0x6464_7002_u32.to_le_bytes()[..],
        &[7, 0, 0, 3],
        &[0; 8],
        &3_u32.to_le_bytes(),
        &[0; 28],
        b"tensor\0\0\0\0\0\0\0\0\0\0",
    ]
    .concat();
    let hello: Vec<u8> = [
        &0x6464_7072_756e_0002_u64.to_le_bytes()[..],
        &1_u64.to_le_bytes(),
        &1_u64.to_le_bytes(),
        &[3; 64],
    ]
    .concat();
    let address = br#"{"node":0,"local":1,"unix":"ddp-00ff","tcp":"10.0.0.1:4000"}"#.to_vec();
    let message =
        br#"{"refusal":null,"number":7,"address":{"unix":"ddp-00ff","tcp":"[::1]:4000"}}                "#
            .to_vec();
    assert!(!read_foreign(&header)[0], "it is another rank's call");
    assert!(read_foreign(&address)[2], "the address is one");
    Target::new("data_plane", vec![header, hello, address, message], |bytes| {
        assert!(!read_foreign(bytes)[1], "it proves something without the key");
    })
}

pub(crate) fn nccl_meeting() -> Target {
    let id: Vec<u8> = (0..128).collect();
    let meeting = serde_json::json!({"version": "2.30.4", "id": id})
        .to_string()
        .into_bytes();
    assert!(read_foreign_id(&meeting), "it is one");
    Target::new("nccl_meeting", vec![meeting], |bytes| {
        read_foreign_id(bytes);
    })
}
