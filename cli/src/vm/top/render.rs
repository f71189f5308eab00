//! A sample as text.

use weft_node::size::format_bytes;

use super::sample::{MemorySample, Sample};
use crate::summary::{count, format_seconds};
use crate::table::{self, Align};

/// A line for the machine, one for each vCPU, one for each node.
pub fn render(sample: &Sample) -> String {
    let mut text = format!(
        "vm {} {} for {}\n{}\n\n",
        sample.name,
        sample.state,
        format_seconds(sample.uptime_s),
        memory(&sample.memory),
    );
    text += &vcpus(sample);
    if !sample.nodes.is_empty() {
        text += "\n";
        text += &nodes(sample);
    }
    text
}

fn memory(memory: &MemorySample) -> String {
    let mut text = format!(
        "memory {} of {} in use on the hosts",
        format_bytes(memory.host_bytes),
        format_bytes(memory.guest_bytes)
    );
    if let (Some(bytes), Some(target)) = (memory.balloon_bytes, memory.balloon_target_bytes)
        && (bytes, target) != (0, 0)
    {
        text += &format!(
            "; balloon {} of {}",
            format_bytes(bytes),
            format_bytes(target)
        );
    }
    text
}

fn vcpus(sample: &Sample) -> String {
    use Align::{Left, Right};
    let headings = [
        ("vCPU", Right),
        ("node", Right),
        ("moves", Right),
        ("state", Left),
        ("exits/s", Right),
        ("interrupts/s", Right),
        ("faults/s", Right),
        ("waited", Right),
    ];
    let rows: Vec<Vec<String>> = sample
        .vcpus
        .iter()
        .map(|vcpu| {
            vec![
                vcpu.vcpu.to_string(),
                vcpu.node.to_string(),
                vcpu.epoch.to_string(),
                vcpu.state.clone(),
                whole(vcpu.exits),
                whole(vcpu.interrupts),
                whole(vcpu.faults),
                format!("{:.1} %", vcpu.waited * 100.0),
            ]
        })
        .collect();
    table::render(&headings, &rows)
}

fn nodes(sample: &Sample) -> String {
    use Align::Right;
    let headings = [
        ("node", Right),
        ("memory", Right),
        ("of", Right),
        ("evicted/s", Right),
        ("faults/s", Right),
        ("pages sent/s", Right),
        ("received/s", Right),
        ("messages sent/s", Right),
        ("received/s", Right),
        ("bytes sent/s", Right),
        ("received/s", Right),
    ];
    let rows: Vec<Vec<String>> = sample
        .nodes
        .iter()
        .map(|node| {
            vec![
                node.node.to_string(),
                format_bytes(node.memory_bytes),
                node.budget_bytes.map_or("all".into(), format_bytes),
                whole(node.evicted),
                whole(node.faults),
                whole(node.pages_sent),
                whole(node.pages_received),
                whole(node.messages_sent),
                whole(node.messages_received),
                format_bytes(node.bytes_sent as u64),
                format_bytes(node.bytes_received as u64),
            ]
        })
        .collect();
    table::render(&headings, &rows)
}

fn whole(rate: f64) -> String {
    count(rate.round() as u64)
}
