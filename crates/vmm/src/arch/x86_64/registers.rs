//! General and segment registers: KVM's structures to the saved ones, and back.

use dormouse_snapshot::devices::x86::{Regs, Segment, Sregs};
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};

#[must_use]
pub fn save_regs(from: &kvm_regs) -> Regs {
    Regs {
        general: [
            from.rax, from.rbx, from.rcx, from.rdx, from.rsi, from.rdi, from.rsp, from.rbp, from.r8, from.r9,
            from.r10, from.r11, from.r12, from.r13, from.r14, from.r15,
        ],
        rip: from.rip,
        rflags: from.rflags,
    }
}

#[must_use]
pub fn load_regs(from: &Regs) -> kvm_regs {
    let [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15] = from.general;
    let (rip, rflags) = (from.rip, from.rflags);
    kvm_regs { rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags }
}

#[must_use]
pub fn save_sregs(from: &kvm_sregs) -> Sregs {
    let table = |table: &kvm_dtable| (table.base, table.limit);
    Sregs {
        segments: [from.cs, from.ds, from.es, from.fs, from.gs, from.ss, from.tr, from.ldt].map(save_segment),
        gdt: table(&from.gdt),
        idt: table(&from.idt),
        control: [from.cr0, from.cr2, from.cr3, from.cr4, from.cr8],
        efer: from.efer,
        apic_base: from.apic_base,
        interrupt_bitmap: from.interrupt_bitmap,
    }
}

#[must_use]
pub fn load_sregs(from: &Sregs) -> kvm_sregs {
    let table = |(base, limit): (u64, u16)| kvm_dtable { base, limit, ..Default::default() };
    let [cs, ds, es, fs, gs, ss, tr, ldt] = from.segments.map(load_segment);
    let [cr0, cr2, cr3, cr4, cr8] = from.control;
    kvm_sregs {
        cs,
        ds,
        es,
        fs,
        gs,
        ss,
        tr,
        ldt,
        gdt: table(from.gdt),
        idt: table(from.idt),
        cr0,
        cr2,
        cr3,
        cr4,
        cr8,
        efer: from.efer,
        apic_base: from.apic_base,
        interrupt_bitmap: from.interrupt_bitmap,
    }
}

fn save_segment(from: kvm_segment) -> Segment {
    Segment {
        base: from.base,
        limit: from.limit,
        selector: from.selector,
        attributes: [
            from.type_,
            from.present,
            from.dpl,
            from.db,
            from.s,
            from.l,
            from.g,
            from.avl,
            from.unusable,
        ],
    }
}

fn load_segment(from: Segment) -> kvm_segment {
    let [type_, present, dpl, db, s, l, g, avl, unusable] = from.attributes;
    kvm_segment {
        base: from.base,
        limit: from.limit,
        selector: from.selector,
        type_,
        present,
        dpl,
        db,
        s,
        l,
        g,
        avl,
        unusable,
        padding: 0,
    }
}
