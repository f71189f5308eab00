//! Which node an executing home waits for in vain.

/// The node whose answer is missing, if that is certain. Nodes are numbered from home,
/// which is 0; in the sets, each node is a bit.
///
/// `unsynced`: nodes that have not confirmed the layout. `owner`: the owner of the page
/// that a fault waits for at the moment. `linked`: nodes that home has links to.
pub fn silent_node(unsynced: u32, owner: Option<usize>, linked: u32) -> Option<usize> {
    let lowest = |set: u32| (set != 0).then(|| set.trailing_zeros() as usize);
    let owner = owner.filter(|&node| linked & 1 << node != 0);
    let only = lowest(linked).filter(|_| linked.is_power_of_two());
    lowest(unsynced & linked).or(owner).or(only)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_named_only_if_its_answer_is_missing() {
        let three = 0b1110;
        // Node 2 has not confirmed the layout; the owner of a page does not matter then.
        assert_eq!(silent_node(0b0100, Some(1), three), Some(2));
        // A lost node that had not confirmed it is not waited for.
        assert_eq!(silent_node(0b0100, None, 0b1010), None);
        // The owner of the page that is waited for; never home, nor a node that is lost.
        assert_eq!(silent_node(0, Some(3), three), Some(3));
        assert_eq!(silent_node(0, Some(0), three), None);
        assert_eq!(silent_node(0, Some(2), 0b1010), None);
        // There is only one other node.
        assert_eq!(silent_node(0, None, 0b0100), Some(2));
        assert_eq!(silent_node(0, None, 0), None);
    }
}
