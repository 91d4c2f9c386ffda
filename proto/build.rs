//! Compiles `rendezvous.proto` with protox, so that no `protoc` is needed on the machine.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/rendezvous.proto");
    let files = protox::compile(["rendezvous.proto"], ["proto"])?;
    // What `src/compatibility_tests.rs` compares with the committed one.
    let descriptor = Path::new(&std::env::var("OUT_DIR")?).join("descriptor.bin");
    std::fs::write(descriptor, protox::prost::Message::encode_to_vec(&files))?;
    tonic_prost_build::configure()
        .build_transport(true)
        .codec_path("crate::codec::SmallBuffers")
        // Most joins carry none.
        .boxed(".ddp.rendezvous.v1.Join.place")
        // Shared by all that are answered.
        .bytes(".ddp.rendezvous.v1.KvGatherReply.entries")
        .bytes(".ddp.rendezvous.v1.KvGetReply.value")
        .bytes(".ddp.rendezvous.v1.NodesReply.list")
        // It carries a secret.
        .skip_debug([".ddp.rendezvous.v1.Assignment"])
        .compile_fds(files)?;
    Ok(())
}
