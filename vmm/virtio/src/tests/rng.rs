//! Entropy.

use super::{started, to_read, to_write};
use crate::fake_driver::Machine;
use crate::rng::Rng;

#[test]
fn buffers_are_filled_and_announced() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = started(&machine, device.slot());
    let buffers = [to_write(&machine, 100), to_write(&machine, 28)];
    assert_eq!(driver.request(0, &buffers), 128);
    assert!(machine.messages.wait(1), "no interrupt");
    assert_ne!(machine.bytes(buffers[0].address, 100), [0; 100]);
    assert_eq!(device.counters().requests, 1);
}

#[test]
fn a_seed_gives_the_same_bytes_also_across_a_restore() {
    let ask = |driver: &mut super::Driver, machine: &Machine| {
        let buffer = to_write(machine, 64);
        driver.request(0, &[buffer]);
        machine.bytes(buffer.address, 64)
    };
    let first = Machine::new();
    let device = first.attach(Rng::new(Some(7))).unwrap();
    let mut driver = started(&first, device.slot());
    let expected = [ask(&mut driver, &first), ask(&mut driver, &first)];

    let second = Machine::new();
    let device = second.attach(Rng::new(Some(7))).unwrap();
    let mut driver = started(&second, device.slot());
    assert_eq!(ask(&mut driver, &second), expected[0]);
    let third = super::transport::moved(&second, &device, Rng::new(None));
    let mut driver = third.driver(driver.queues);
    assert_eq!(ask(&mut driver, &third.machine), expected[1]);
}

#[test]
fn a_readable_buffer_stops_the_device_until_it_is_reset() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = started(&machine, device.slot());
    let head = driver.chain(0, &[to_read(&machine, b"lie")]);
    driver.offer(0, head);
    driver.kick(0);
    assert!(driver.wait_needs_reset());
    assert!(machine.messages.wait(0), "no configuration interrupt");
    driver.start(u64::MAX, 64);
    assert_eq!(driver.request(0, &[to_write(&machine, 8)]), 8);
}
