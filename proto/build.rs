//! Compiles `rendezvous.proto` with protox, so that no `protoc` is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/rendezvous.proto");
    let files = protox::compile(["rendezvous.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(true)
        .codec_path("crate::codec::SmallBuffers")
        // Most joins carry none.
        .boxed(".ddp.rendezvous.v1.Join.place")
        // Shared by all that are answered.
        .bytes(".ddp.rendezvous.v1.KvGatherReply.entries")
        .bytes(".ddp.rendezvous.v1.NodesReply.list")
        .compile_fds(files)?;
    Ok(())
}
