//! Checkpoints of a run: saving, resuming, and the global batch of a run that is resumed on other ranks.
//!
//! | file | what it holds |
//! |---|---|
//! | `checkpoints.rs` | saves as the training loop sees them; what follows from how far each rank is |
//! | `save_thread.rs` | one save, written beside the training; what it waits for |
//! | `kept.rs` | what a rank keeps in memory of a generation that ended, and gives to ranks that lack it |
//! | `buddy.rs` | a second copy of another rank's part of the state, where no other rank has one |
//! | `owned_state.rs` | what of the state a rank owns, writes and reads |
//! | `resume.rs` | where the state of a run comes from: the seed, published weights, a checkpoint, memory |
//! | `recovery.rs` | where a run goes on: at what its ranks still have in memory, or at the checkpoint |
//! | `rescale.rs` | the global batch of a run that goes on on another number of ranks |

mod buddy;
mod checkpoints;
mod kept;
mod owned_state;
mod recovery;
mod rescale;
mod resume;
mod save_thread;

pub(crate) use buddy::BuddyCopy;
pub(super) use checkpoints::{Checkpoints, Position, SavedRun, failed_saves, identity};
pub(super) use kept::{Kept, UnfinishedStep, exchange, recover};
pub(super) use owned_state::{RankState, load};
pub use recovery::{Decision, GoOn, Held, Place, Version, decide};
pub(super) use rescale::{BatchBefore, allowed_sizes, rescale};
pub(super) use resume::{Origin, document, open_checkpoint};
pub use resume::{check_initial_weights, check_resumes};
