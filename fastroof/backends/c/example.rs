//! Time the steps of one plan:  rustc -O example.rs -C link-arg=fastroof_step.o && ./example NAME.plan
use std::ffi::{c_void, CStr, CString};
use std::os::raw::c_char;
use std::{env, process, ptr, time::Instant};

type Raw = *const c_void;

/// fastroof_memory_of of the header.
#[repr(C)]
#[derive(Default)]
#[allow(dead_code)] // fields that this example does not read
struct Memory {
    weight_bytes: i64,
    kv_bytes_per_token: i64,
    activation_reserve_context_bytes: [i64; 3],
    max_kv_tokens: i64,
    of_windows_states_and_the_model: [i64; 6],
}

extern "C" {
    fn fastroof_open(path: *const c_char, plan: *mut Raw) -> i32;
    fn fastroof_close(plan: Raw);
    fn fastroof_describe(plan: Raw) -> *const c_char;
    fn fastroof_memory(plan: Raw, memory: *mut Memory) -> i32;
    fn fastroof_verify_us(plan: Raw, batch_size: i64, kv_len: i64, tokens: i64, us: *mut f64) -> i32;
    fn fastroof_decode_us(plan: Raw, batch_size: i64, kv_len: i64, step_us: *mut f64) -> i32;
    fn fastroof_step_us(plan: Raw, new: *const i64, ctx: *const i64, n: i64, us: *mut f64) -> i32;
}

struct Plan(Raw);

impl Plan {
    fn open(path: &str) -> Plan {
        let path = CString::new(path).expect("a path without NUL");
        let mut plan = ptr::null();
        check(unsafe { fastroof_open(path.as_ptr(), &mut plan) });
        Plan(plan)
    }

    fn describe(&self) -> &str {
        let text = unsafe { CStr::from_ptr(fastroof_describe(self.0)) };
        text.to_str().expect("JSON")
    }

    fn memory(&self) -> Memory {
        let mut memory = Memory::default();
        check(unsafe { fastroof_memory(self.0, &mut memory) });
        memory
    }

    fn verify_us(&self, batch_size: i64, kv_len: i64, tokens: i64) -> f64 {
        let mut us = 0.0;
        check(unsafe { fastroof_verify_us(self.0, batch_size, kv_len, tokens, &mut us) });
        us
    }

    fn decode_us(&self, batch_size: i64, kv_len: i64) -> f64 {
        let mut us = 0.0;
        check(unsafe { fastroof_decode_us(self.0, batch_size, kv_len, &mut us) });
        us
    }

    fn step_us(&self, requests: &[(i64, i64)]) -> f64 {
        let (new, ctx): (Vec<i64>, Vec<i64>) = requests.iter().copied().unzip();
        let (n, mut us) = (requests.len() as i64, 0.0);
        check(unsafe { fastroof_step_us(self.0, new.as_ptr(), ctx.as_ptr(), n, &mut us) });
        us
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        unsafe { fastroof_close(self.0) }
    }
}

fn check(code: i32) {
    if code != 0 {
        eprintln!("example: error {} of fastroof_step.h", code);
        process::exit(1);
    }
}

fn show(what: &str, us: f64) {
    println!("{}: {:.3} us, bits {:016x}", what, us, us.to_bits());
}

fn main() {
    let Some(path) = env::args().nth(1) else {
        eprintln!("usage: example NAME.plan");
        process::exit(2);
    };
    let plan = Plan::open(&path);
    println!("plan: {}", plan.describe());

    let Memory { max_kv_tokens, kv_bytes_per_token, .. } = plan.memory();
    println!("{} tokens of KV cache fit, {} bytes each", max_kv_tokens, kv_bytes_per_token);

    show("64 decodes at 4096 tokens", plan.decode_us(64, 4096));
    show("the same, 4 tokens verified by each", plan.verify_us(64, 4096, 4));

    let mut requests = vec![(2048, 0)];
    requests.extend((1..32).map(|i| (1, 100 * i)));
    let us = plan.step_us(&requests);
    show("a prompt of 2048 tokens and 31 decodes", us);

    let calls = 1_000_000;
    let mut sum_us = 0.0;
    let start = Instant::now();
    for i in 0..calls {
        sum_us += plan.decode_us(1 + i % 256, 1 + i % 8191);
    }
    let ns = start.elapsed().as_nanos() as f64 / calls as f64;
    show("1000000 decode steps", sum_us);
    println!("a call: {:.1} ns", ns);
}
