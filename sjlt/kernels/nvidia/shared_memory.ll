; The address of the last bytes of a program's shared memory, for `shared_memory.py`. CUDA places all external arrays of
; shared memory at the same address, where Triton may keep its own data; so the caller's part is counted from the end.

@dynamic = external addrspace(3) global [0 x i8], align 16

define linkonce_odr i32 @sjlt_shared_begin(i32 %bytes) alwaysinline {
  %size = call i32 asm "mov.u32 $0, %dynamic_smem_size;", "=r"()
  %offset = sub i32 %size, %bytes
  %start = ptrtoint ptr addrspace(3) @dynamic to i32
  %begin = add i32 %start, %offset
  ret i32 %begin
}
