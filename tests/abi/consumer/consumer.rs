// A Rust program over what bindgen makes of the headers: it trains nothing, but uses each kind of handle and struct.
// The macros and inline functions of the headers do not reach Rust: sizes of structs are set here, and accesses written
// out. SPDX-License-Identifier: Apache-2.0
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, dead_code, deref_nullptr, improper_ctypes)]
use std::ffi::CStr;
use std::mem::{size_of, zeroed};

include!(env!("GEMINI_BINDINGS"));

fn check(status: gemini_status_t) {
    if status != GEMINI_OK {
        panic!("{}", unsafe { CStr::from_ptr(gemini_error_text()) }.to_str().unwrap());
    }
}

fn access(tensor: gemini_tensor_t, mode: u32, tier: u32) -> gemini_access_t {
    let mut out: gemini_access_t = unsafe { zeroed() };
    out.struct_size = size_of::<gemini_access_t>() as u32;
    out.object.tensor = tensor;
    out.mode = mode;
    out.tier = tier;
    out
}

fn main() {
    unsafe {
        let mut config: gemini_config_t = zeroed();
        config.struct_size = size_of::<gemini_config_t>() as u32;
        config.device_bytes = 1 << 20;
        config.host_bytes = 4 << 20;
        config.chunk_bytes = 64 << 10;
        let mut mgr: gemini_manager_t = std::ptr::null_mut();
        check(gemini_manager_open(&config, &mut mgr));
        let mut arena_config: gemini_arena_config_t = zeroed();
        arena_config.struct_size = size_of::<gemini_arena_config_t>() as u32;
        arena_config.kind = GEMINI_KIND_PARAM as u32;
        arena_config.element_bytes = 4;
        let mut arena: gemini_arena_t = std::ptr::null_mut();
        check(gemini_arena_create(mgr, &arena_config, &mut arena));
        for layer in 0..32 {
            // 2 MiB, twice what the device holds
            let name = std::ffi::CString::new(format!("layer {}", layer)).unwrap();
            let mut tensor: gemini_tensor_t = std::ptr::null_mut();
            check(gemini_tensor_register(mgr, arena, name.as_ptr(), 64 << 10, u64::MAX, &mut tensor));
            let mut used = access(tensor, GEMINI_WRITE as u32, GEMINI_TIER_DEVICE as u32);
            check(gemini_acquire(mgr, &mut used, 1, std::ptr::null_mut()));
            std::slice::from_raw_parts_mut(used.ptr as *mut f32, 16 << 10).fill(0.5);
            check(gemini_release(mgr, &used, 1, std::ptr::null_mut()));
        }
        let mut all: gemini_access_t = zeroed();
        all.struct_size = size_of::<gemini_access_t>() as u32;
        all.object.arena = arena;
        all.mode = GEMINI_READ as u32;
        let mut norm = 0.0;
        check(gemini_norm(mgr, &all, GEMINI_DTYPE_F32 as u32, std::ptr::null_mut(), &mut norm));
        assert_eq!(norm, (32.0 * 16.0 * 1024.0 * 0.25f64).sqrt());
        let mut stats: gemini_stats_t = zeroed();
        stats.struct_size = size_of::<gemini_stats_t>() as u32;
        check(gemini_stats(mgr, &mut stats));
        assert_eq!(stats.model_bytes, 2 << 20);
        assert_eq!(gemini_arena_destroy(mgr, mgr as gemini_arena_t), GEMINI_ERR_HANDLE);
        check(gemini_manager_close(mgr));
        println!("gemini {}", CStr::from_ptr(gemini_version()).to_str().unwrap());
    }
}
