//! The typed client of the rendezvous service: every call has a deadline, every retry a jittered back-off.
