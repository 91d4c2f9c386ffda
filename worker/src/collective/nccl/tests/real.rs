//! The real library: needs no GPU. Without one on the search path of the process the tests say so and pass, unless
//! `DDP_REQUIRE_NCCL` is set.

use crate::collective::nccl::Nccl;
use crate::collective::nccl::sys::Version;
use crate::libraries::LibraryError;

fn nccl() -> Option<Nccl> {
    match Nccl::load() {
        Ok(nccl) => Some(nccl),
        Err(error @ LibraryError::NotFound { .. }) => {
            assert!(std::env::var_os("DDP_REQUIRE_NCCL").is_none(), "{error}");
            eprintln!("SKIPPED, NCCL was not tested: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn its_version_is_new_enough_and_all_functions_are_there() {
    if let Some(nccl) = nccl() {
        eprintln!("{nccl:?}");
        assert!(nccl.version() >= Version::LEAST);
    }
}

#[test]
fn it_opens_a_meeting_point_without_a_gpu() {
    if let Some(nccl) = nccl() {
        let (first, second) = (nccl.unique_id().unwrap(), nccl.unique_id().unwrap());
        assert_ne!(first.0, second.0);
    }
}
