//! Where a driver finds the structures (4.1.4).

use weft_platform::pci::{Endpoint, PciError};

use super::{
    DEVICE, ISR, NOTIFY, NOTIFY_MULTIPLIER, REGISTERS_BAR, REGISTERS_SIZE, common::COMMON_SIZE,
};

/// Vendor-specific capability.
const VENDOR_SPECIFIC: u8 = 9;
const COMMON_CFG: u8 = 1;
const NOTIFY_CFG: u8 = 2;
const ISR_CFG: u8 = 3;
const DEVICE_CFG: u8 = 4;
const PCI_CFG: u8 = 5;
/// Offsets into struct virtio_pci_cap.
const CAP_BAR: u16 = 4;
const CAP_OFFSET: u16 = 8;

/// A register of BAR 0.
pub struct Target {
    pub offset: u64,
    pub length: usize,
}

/// struct virtio_pci_cap without its link, and with what follows it.
fn body(kind: u8, offset: u64, length: u64, more: Option<u32>) -> Vec<u8> {
    let size = if more.is_some() { 20 } else { 16 };
    let mut body = vec![size, kind, REGISTERS_BAR, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend((length as u32).to_le_bytes());
    body.extend(more.map(u32::to_le_bytes).into_iter().flatten());
    body
}

/// Appends all capabilities; where the one for access through configuration
/// space is.
pub fn add(endpoint: &Endpoint, device_size: u32, queues: u32) -> Result<u16, PciError> {
    let notify_size = u64::from(queues) * NOTIFY_MULTIPLIER;
    let multiplier = Some(NOTIFY_MULTIPLIER as u32);
    for body in [
        body(COMMON_CFG, 0, COMMON_SIZE, None),
        body(ISR_CFG, ISR, 1, None),
        body(NOTIFY_CFG, NOTIFY, notify_size, multiplier),
    ] {
        endpoint.add_capability(VENDOR_SPECIFIC, &body, &[])?;
    }
    if device_size > 0 {
        let body = body(DEVICE_CFG, DEVICE, u64::from(device_size), None);
        endpoint.add_capability(VENDOR_SPECIFIC, &body, &[])?;
    }
    // The driver chooses BAR, offset and length, and finds the data behind them.
    let mut writable = [0xff; 18];
    writable[..2].fill(0);
    writable[3..6].fill(0);
    let body = body(PCI_CFG, 0, 0, Some(0));
    let at = endpoint.add_capability(VENDOR_SPECIFIC, &body, &writable)?;
    Ok(u16::from(at))
}

/// What the driver points to with the last capability.
pub fn target(endpoint: &Endpoint, capability: u16) -> Option<Target> {
    let mut bar = [0; 1];
    endpoint.read(capability + CAP_BAR, &mut bar);
    let mut place = [0; 8];
    endpoint.read(capability + CAP_OFFSET, &mut place);
    let place = u64::from_le_bytes(place);
    let (offset, length) = (place & 0xffff_ffff, place >> 32);
    let fits = matches!(length, 1 | 2 | 4)
        && offset.is_multiple_of(length)
        && offset + length <= REGISTERS_SIZE;
    (bar == [REGISTERS_BAR] && fits).then_some(Target {
        offset,
        length: length as usize,
    })
}
