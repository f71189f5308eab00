//! How the runtime is linked: without a C library, static, at an address far
//! from every place that programs and the kernel use.

/// Base of the runtime's image. Program memory lies below 8 TiB, the kernel's
/// own choices lie near the top.
const IMAGE_BASE: &str = "0x600000000000";

fn main() {
    for argument in ["-nostartfiles", "-nostdlib", "-static", "-no-pie"] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    println!("cargo:rustc-link-arg-bins=-Wl,--image-base={IMAGE_BASE}");
    println!("cargo:rustc-link-arg-bins=-Wl,--build-id=none");
}
