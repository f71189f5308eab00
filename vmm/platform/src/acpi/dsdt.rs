//! The DSDT: the devices that a kernel cannot discover by itself, in AML.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Arg, CreateDWordField, Device, EISAName, Else, Equal,
    Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Interrupt, Local,
    Memory32Fixed, Method, Name, NotEqual, Notify, OpRegion, OpRegionSpace, Or, Package,
    PackageBuilder, Path, ResourceTemplate, Return, Scope, Store, Uuid, ZERO,
};
use weft_guest_memory::{DEVICE_HOLE, ECAM, PCI_WINDOW_END};

use super::power::{BUTTON_PRESSED, EVENTS, PORTS, SLEEP_TYPE_OFF};
use super::{Description, EVENT_LINE, SERIAL_LINE, SERIAL_PORTS};
use crate::pci;

/// Ports of PCI's configuration mechanism 1: not for BARs.
const PCI_CONFIGURATION: u16 = 0xcf8;
const ECAM_BYTES: u32 = 1 << 20;
/// `_OSC` of a PCI Express host bridge (PCI Firmware Specification 3.3, 4.5.1).
const PCI_OSC: &str = "33db4d5b-1ff7-401c-9657-7441c03dd766";
/// Bits of `_OSC`'s first word (6.2.11.1).
const OSC_UNKNOWN_UUID: u8 = 1 << 2;
const OSC_UNKNOWN_REVISION: u8 = 1 << 3;
/// Notification of a button that was pressed (table 5.141).
const PRESSED: u8 = 0x80;
const CLOCK_PORTS: u16 = 0x70;

/// The AML after the table's header.
pub fn code(description: &Description) -> Vec<u8> {
    let mut bytes = Vec::new();
    let off = Package::new(vec![&SLEEP_TYPE_OFF, &ZERO, &ZERO, &ZERO]);
    Name::new("\\_S5_".into(), &off).to_aml_bytes(&mut bytes);

    let mut devices = Vec::new();
    host_bridge(description, &mut devices);
    motherboard(&mut devices);
    serial_port(&mut devices);
    if description.real_time_clock {
        real_time_clock(&mut devices);
    }
    power_button(&mut devices);
    bytes.extend_from_slice(&Scope::raw("\\_SB_".into(), devices));
    bytes
}

fn name(path: &str, value: &dyn Aml) -> Name {
    Name::new(path.into(), value)
}

fn line(number: u32, edge_triggered: bool) -> Interrupt {
    Interrupt::new(true, edge_triggered, false, false, number)
}

fn host_bridge(description: &Description, bytes: &mut Vec<u8>) {
    let uncached = AddressSpaceCacheable::NotCacheable;
    let high = &description.high_window;
    let resources = ResourceTemplate::new(vec![
        &AddressSpace::<u16>::new_bus_number(0, 0),
        &IO::new(PCI_CONFIGURATION, PCI_CONFIGURATION, 1, 8),
        &AddressSpace::<u16>::new_io(0, PCI_CONFIGURATION - 1, None),
        &AddressSpace::<u16>::new_io(PCI_CONFIGURATION + 8, u16::MAX, None),
        &AddressSpace::<u32>::new_memory(
            uncached,
            true,
            DEVICE_HOLE as u32,
            PCI_WINDOW_END as u32 - 1,
            None,
        ),
        &AddressSpace::<u64>::new_memory(uncached, true, high.start, high.end - 1, None),
    ])
    .encoded();
    let mut routes = PackageBuilder::new();
    for slot in 0..pci::SLOTS {
        // Functions here have INTA# (pin 0) only.
        let device = u32::from(slot) << 16 | 0xffff;
        let line = pci::pin_of_slot(slot);
        let route = Package::new(vec![&device, &ZERO, &ZERO, &line]);
        routes.add_element(&route);
    }
    // Devices are the home slice's; Linux warns when it is not told.
    let near = name("_PXM", &ZERO);
    let mut children: Vec<u8> = [
        name("_HID", &EISAName::new("PNP0A08")),
        name("_CID", &EISAName::new("PNP0A03")),
        name("_SEG", &ZERO),
        name("_BBN", &ZERO),
        name("_UID", &ZERO),
        near,
        name("_CRS", &Raw(resources)),
        name("_PRT", &routes),
    ]
    .iter()
    .flat_map(|child| child.encoded())
    .collect();
    children.extend(osc());
    device("PCI0", children, bytes);
}

/// AML made before.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

/// Makes AML now, so that its parts need not live longer.
trait Encode: Aml {
    fn encoded(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.to_aml_bytes(&mut bytes);
        bytes
    }
}

impl<T: Aml> Encode for T {}

fn device(path: &str, children: Vec<u8>, bytes: &mut Vec<u8>) {
    Device::new(path.into(), vec![&Raw(children)]).to_aml_bytes(bytes);
}

/// Grants the kernel all features that it requests: no firmware uses them.
fn osc() -> Vec<u8> {
    let status = Path::new("CDW1");
    let complain = |bit: u8| Or::new(&Path::new("CDW1"), &Path::new("CDW1"), &bit).encoded();
    let unknown_revision = Raw(complain(OSC_UNKNOWN_REVISION));
    let unknown_uuid = Raw(complain(OSC_UNKNOWN_UUID));
    Method::new(
        "_OSC".into(),
        4,
        true,
        vec![
            &CreateDWordField::new(&status, &Arg(3), &ZERO),
            &If::new(
                &Equal::new(&Arg(0), &Uuid::new(PCI_OSC)),
                vec![&If::new(
                    &NotEqual::new(&Arg(1), &acpi_tables::aml::ONE),
                    vec![&unknown_revision],
                )],
            ),
            &Else::new(vec![&unknown_uuid]),
            &Return::new(&Arg(3)),
        ],
    )
    .encoded()
}

/// Reserves ECAM and the ports of the machine, and makes the kernel trust MCFG.
fn motherboard(bytes: &mut Vec<u8>) {
    let count = (PORTS.end - PORTS.start) as u8;
    let resources = ResourceTemplate::new(vec![
        &Memory32Fixed::new(true, ECAM as u32, ECAM_BYTES),
        &IO::new(PORTS.start, PORTS.start, 1, count),
    ])
    .encoded();
    let children = [
        name("_HID", &EISAName::new("PNP0C02")),
        name("_UID", &ZERO),
        name("_CRS", &Raw(resources)),
    ];
    device("MBRD", join(&children), bytes);
}

fn serial_port(bytes: &mut Vec<u8>) {
    let start = SERIAL_PORTS.start;
    let resources = ResourceTemplate::new(vec![
        &IO::new(start, start, 1, SERIAL_PORTS.len() as u8),
        &line(SERIAL_LINE, true),
    ])
    .encoded();
    let children = [
        name("_HID", &EISAName::new("PNP0501")),
        name("_UID", &ZERO),
        name("_DDN", &"COM1"),
        name("_CRS", &Raw(resources)),
    ];
    device("COM1", join(&children), bytes);
}

/// Without a line: it has no alarm.
fn real_time_clock(bytes: &mut Vec<u8>) {
    let resources = ResourceTemplate::new(vec![&IO::new(CLOCK_PORTS, CLOCK_PORTS, 1, 2)]).encoded();
    let children = [
        name("_HID", &EISAName::new("PNP0B00")),
        name("_CRS", &Raw(resources)),
    ];
    device("RTC_", join(&children), bytes);
}

/// The power button, and the Generic Event Device (5.6.9) that notifies it.
fn power_button(bytes: &mut Vec<u8>) {
    let children = [name("_HID", &EISAName::new("PNP0C0C")), name("_UID", &ZERO)];
    device("PWRB", join(&children), bytes);

    let resources = ResourceTemplate::new(vec![&line(EVENT_LINE, false)]).encoded();
    let names = [
        name("_HID", &"ACPI0013"),
        name("_UID", &ZERO),
        name("_CRS", &Raw(resources)),
    ];
    let mut children = join(&names);
    OpRegion::new("PORT".into(), OpRegionSpace::SystemIO, &EVENTS, &1_u8)
        .to_aml_bytes(&mut children);
    Field::new(
        "PORT".into(),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![FieldEntry::Named(*b"EVTS", 8)],
    )
    .to_aml_bytes(&mut children);
    // Reading takes the events, so once.
    Method::new(
        "_EVT".into(),
        1,
        true,
        vec![
            &Store::new(&Local(0), &Path::new("EVTS")),
            &If::new(
                &Equal::new(&Local(0), &BUTTON_PRESSED),
                vec![&Notify::new(&Path::new("\\_SB_.PWRB"), &PRESSED)],
            ),
        ],
    )
    .to_aml_bytes(&mut children);
    device("GED_", children, bytes);
}

fn join(names: &[Name]) -> Vec<u8> {
    names.iter().flat_map(|name| name.encoded()).collect()
}
