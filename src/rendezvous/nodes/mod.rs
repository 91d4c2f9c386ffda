//! What is known of many nodes without a look at all of them.
//!
//! | module | what it is |
//! |---|---|
//! | [`index`] | who is ready, who is away, whose lease ends next |
//! | [`list`] | the nodes of a generation, and the assignment of each |
//! | [`deadlines`] | the next of many deadlines |

pub(super) mod deadlines;
pub(super) mod index;
pub(super) mod list;
