//! How messages of the rendezvous service become bytes: as protobuf, in small buffers.
//!
//! tonic's own codec begins with 8 KiB for each direction of a stream, and keeps them. Most messages have less than
//! 100 bytes, and a daemon has a stream open for each of thousands of nodes. A buffer grows where a message needs it.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstCodec;

/// A heartbeat and a short assignment fit.
const BUFFER_BYTES: usize = 512;
/// As in tonic: so much is collected before it is passed on.
const YIELD_BYTES: usize = 32 << 10;

/// Protobuf in small buffers.
#[derive(Debug)]
pub struct SmallBuffers<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallBuffers<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for SmallBuffers<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BUFFER_BYTES, YIELD_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER_BYTES, YIELD_BYTES))
    }
}
