//! The process of a virtual machine's node, `weft-monitor`, as far as the command that
//! asks for a machine has to know it: what it tells the processes, and what they say of
//! the machine's life. The launcher between them (`weft_node::launch::machine`) carries
//! both without understanding them.

pub mod outcome;
pub mod settings;
pub mod trace;
