//! What a job keeps of many nodes.
//!
//! | module | what it is |
//! |---|---|
//! | [`list`] | the nodes of a generation, and the assignment of each |
//! | [`deadlines`] | the next of many deadlines |

pub(super) mod deadlines;
pub(super) mod list;
