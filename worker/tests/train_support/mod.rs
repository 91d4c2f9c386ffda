//! What the tests of training share.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

pub mod deferred;
