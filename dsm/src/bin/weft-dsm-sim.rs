//! Runs ranges of seeds through the simulator (being connected).
fn main() {}
