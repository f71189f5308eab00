//! vCPUs to which something comes at the worst moment: after their last look, when
//! they are about to say that they halted.

use std::sync::mpsc::channel;

use weft_guest_memory::{LOCAL_APIC, Ram};
use weft_platform::bus::Bus;
use weft_platform::clock::{Clock, KvmClock, Source, measure_host_tsc};
use weft_platform::interrupts::{InterruptRouter, Message};
use weft_vcpu::{Environment, Kick};

use super::*;

const ROUNDS: u32 = 20;
/// Far less than a halted vCPU sleeps without a reason to wake.
const PATIENCE: Duration = Duration::from_secs(5);

struct NoKick;

impl Kick for NoKick {
    fn kick(&self) {}
}

/// What a run of the CPU does, and whether it ends the test.
type Run = Box<dyn FnMut(&mut dyn Environment, &InterruptRouter) -> bool + Send>;

/// Halts at the end of every run.
struct Halting {
    run: Run,
    interrupts: Arc<InterruptRouter>,
    over: std::sync::mpsc::Sender<()>,
}

impl Vcpu for Halting {
    fn run(&mut self, environment: &mut dyn Environment) -> Result<Exit, VcpuError> {
        if (self.run)(environment, &self.interrupts) {
            let _ = self.over.send(());
        }
        Ok(Exit::Halted)
    }

    fn save(&self) -> Result<CpuState, VcpuError> {
        Ok(CpuState::reset())
    }

    fn restore(&mut self, _: &CpuState) -> Result<(), VcpuError> {
        Ok(())
    }

    fn set_tsc_offset(&mut self, _: u64) -> Result<(), VcpuError> {
        Ok(())
    }

    fn kicker(&self) -> Arc<dyn Kick> {
        Arc::new(NoKick)
    }
}

/// A vCPU that runs, with what it tells: events, and the end of the test.
struct Rig {
    runner: Runner,
    events: Receiver<Event>,
    over: Receiver<()>,
}

fn rig(run: Run) -> Rig {
    let ram = Ram::new(4 << 20).unwrap();
    let interrupts = InterruptRouter::new(1);
    let clock = Arc::new(Clock::new(Source::Host, measure_host_tsc()));
    clock.go();
    let context = VcpuContext {
        mmio: Bus::default(),
        ports: Bus::default(),
        interrupts: interrupts.clone(),
        clock: clock.clone(),
        kvmclock: Arc::new(KvmClock::new(clock, Arc::new(ram.clone()), 1)),
        alarms: None,
        ending: Arc::default(),
    };
    let (tell, over) = channel();
    let (report, events) = channel();
    let report = std::sync::Mutex::new(report);
    let runner = Runner::start(RunnerOptions {
        id: 0,
        vcpu: Box::new(Halting {
            run,
            interrupts,
            over: tell,
        }),
        bootstrap: true,
        initial: Some(CpuState::reset()),
        away: false,
        context,
        scheduler: None,
        listener: Arc::new(move |_, event| drop(report.lock().unwrap().send(event))),
        kind: ThreadKind::SoftVcpu,
        first_instruction: Arc::default(),
    })
    .unwrap();
    runner.command(VcpuCommand::Run).unwrap();
    Rig {
        runner,
        events,
        over,
    }
}

impl Rig {
    fn finish(mut self) {
        assert!(self.runner.finish(Instant::now() + PATIENCE));
    }
}

/// Does not ring, as when the bell came while the CPU was on its way out.
fn post(interrupts: &InterruptRouter, message: Message) {
    interrupts.posted(0).unwrap().post(message);
}

fn write_apic(environment: &mut dyn Environment, register: u64, value: u32) {
    environment.mmio_write(LOCAL_APIC + register, &value.to_le_bytes());
}

#[test]
fn an_interrupt_after_the_last_look_is_taken_at_once() {
    let mut taken = 0;
    let rig = rig(Box::new(move |environment, interrupts| {
        write_apic(environment, 0xf0, 0x1ff);
        while environment.interrupt_take().is_some() {
            taken += 1;
            write_apic(environment, 0xb0, 0);
        }
        let vector = 0x41;
        let level = false;
        post(interrupts, Message::Fixed { vector, level });
        taken == ROUNDS
    }));
    rig.over.recv_timeout(PATIENCE).unwrap();
    rig.finish();
}

#[test]
fn a_timer_that_is_due_after_the_last_look_is_not_forgotten() {
    let mut taken = 0;
    let rig = rig(Box::new(move |environment, _| {
        write_apic(environment, 0xf0, 0x1ff);
        write_apic(environment, 0x320, 1 << 18 | 0xec);
        while environment.interrupt_take().is_some() {
            taken += 1;
            write_apic(environment, 0xb0, 0);
        }
        // In the past: pending at once.
        environment.msr_write(0x6e0, 1);
        taken == ROUNDS
    }));
    rig.over.recv_timeout(PATIENCE).unwrap();
    rig.finish();
}

#[test]
fn a_non_maskable_interrupt_between_two_looks_is_taken_at_once() {
    let mut taken = 0;
    let rig = rig(Box::new(move |environment, interrupts| {
        taken += u32::from(environment.nmi_take());
        post(interrupts, Message::NonMaskable);
        assert!(!environment.interrupt_waits());
        taken == ROUNDS
    }));
    rig.over.recv_timeout(PATIENCE).unwrap();
    rig.finish();
}

#[test]
fn an_init_after_the_last_look_is_told() {
    let rig = rig(Box::new(|environment, interrupts| {
        post(interrupts, Message::Init);
        environment.interrupt_waits()
    }));
    let event = rig.events.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, Event::Init), "{event:?}");
    rig.finish();
}

#[test]
fn what_a_cpu_does_not_accept_lets_it_sleep() {
    let mut runs = 0;
    let rig = rig(Box::new(move |environment, interrupts| {
        write_apic(environment, 0xf0, 0x1ff);
        runs += 1;
        if runs == 1 {
            let vector = 0x41;
            let level = false;
            post(interrupts, Message::Fixed { vector, level });
        }
        assert!(environment.interrupt_waits());
        runs > 3
    }));
    assert!(rig.over.recv_timeout(Duration::from_millis(200)).is_err());
    assert_eq!(rig.runner.activity(), Activity::Halted);
    rig.finish();
}

#[test]
fn an_init_to_itself_brings_a_running_cpu_back() {
    struct Kicked(AtomicBool);
    impl Kick for Kicked {
        fn kick(&self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let interrupts = InterruptRouter::new(1);
    let kicked = Arc::new(Kicked(AtomicBool::new(false)));
    interrupts.posted(0).unwrap().waker.connect(kicked.clone());
    let (vector, level) = (0x41, false);
    for (message, expected) in [
        (Message::Fixed { vector, level }, false),
        (Message::NonMaskable, false),
        (Message::Init, true),
    ] {
        interrupts.deliver(0, message, Some(0));
        assert_eq!(kicked.0.swap(false, Ordering::SeqCst), expected);
    }
}

#[test]
fn the_time_stamp_counter_is_the_machines() {
    let rig = rig(Box::new(move |environment, _| {
        let far = 1 << 60;
        for index in [0x10, 0x3b] {
            assert!(environment.msr_write(index, far));
            assert!(environment.msr_read(index).unwrap() < far);
        }
        assert_eq!(environment.msr_read(0x3b), Some(0));
        true
    }));
    rig.over.recv_timeout(PATIENCE).unwrap();
    rig.finish();
}

#[test]
fn the_clocks_registers_are_saved() {
    let first = rig(Box::new(|environment, _| {
        assert!(environment.msr_write(0x4b56_4d00, 0x3000));
        assert!(environment.msr_write(0x4b56_4d01, 0x1001));
        true
    }));
    first.over.recv_timeout(PATIENCE).unwrap();
    let ask = |rig: &Rig, command| {
        rig.runner.command(command).unwrap();
        rig.runner.reply(Instant::now() + PATIENCE).unwrap()
    };
    // The answer to Run.
    first.runner.reply(Instant::now() + PATIENCE).unwrap();
    ask(&first, VcpuCommand::Pause);
    let state = ask(&first, VcpuCommand::Save).unwrap();
    first.finish();
    let second = rig(Box::new(|environment, _| {
        environment.msr_read(0x4b56_4d00) == Some(0x3000)
            && environment.msr_read(0x4b56_4d01) == Some(0x1001)
    }));
    second.runner.reply(Instant::now() + PATIENCE).unwrap();
    ask(&second, VcpuCommand::Pause);
    assert!(second.over.try_recv().is_err());
    ask(&second, VcpuCommand::Restore(state));
    ask(&second, VcpuCommand::Run);
    second.over.recv_timeout(PATIENCE).unwrap();
    second.finish();
}
