fn main(){ for a in ["-nostartfiles","-nostdlib","-static","-no-pie","-Wl,--image-base=0x600000000000","-Wl,--build-id=none"]{println!("cargo:rustc-link-arg-bins={a}");} }
