package disturb

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// SoftirqHog keeps softirqs from running on a CPU: the kernel turns them off while
// it runs a program for a test, and this one counts.
type SoftirqHog struct {
	cpu     int
	program *ebpf.Program
}

// NewSoftirqHog makes one that holds for about the time, at most a second. How far it
// counts in that is measured on the present thread's CPU.
func NewSoftirqHog(cpu int, d time.Duration) (*SoftirqHog, error) {
	const sample = 200
	load := func(n int64) (*ebpf.Program, error) {
		return ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "MIT", Instructions: counting(n)})
	}
	p, err := load(sample)
	if err != nil {
		return nil, fmt.Errorf("program that keeps softirqs from running: %w", err)
	}
	defer p.Close()
	least := time.Hour
	for range 3 { // others may have had the CPU
		start := time.Now()
		if err := count(p); err != nil {
			return nil, err
		}
		least = min(least, time.Since(start))
	}
	p, err = load(min(1<<23, int64(sample*d.Seconds()/least.Seconds())))
	if err != nil {
		return nil, fmt.Errorf("program that keeps softirqs from running: %w", err)
	}
	return &SoftirqHog{cpu, p}, nil
}

// Hold does it once, from the moment at which a thread of this process gets the CPU:
// begun, if not nil, is called just before.
func (h *SoftirqHog) Hold(begun func()) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		var set unix.CPUSet
		set.Set(h.cpu)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			done <- fmt.Errorf("run on CPU %d: %w", h.cpu, err)
			return
		}
		if begun != nil {
			begun()
		}
		done <- count(h.program)
	}()
	return <-done
}

// Close unloads the program.
func (h *SoftirqHog) Close() error { return h.program.Close() }

func count(p *ebpf.Program) error {
	for {
		_, err := p.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// counting is a program that calls a function n times, at most 1<<23, which does
// so with an empty one 4096 times.
func counting(n int64) asm.Instructions {
	integer := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	function := func(in asm.Instruction, name string) asm.Instruction {
		params := []btf.FuncParam{{Name: "i", Type: integer}, {Name: "context", Type: &btf.Pointer{Target: &btf.Void{}}}}
		if name == "main" {
			params = params[1:]
		}
		return btf.WithFuncMetadata(in.WithSymbol(name), &btf.Func{Name: name, Type: &btf.FuncProto{Return: integer, Params: params}, Linkage: btf.StaticFunc})
	}
	call := func(name string) asm.Instructions {
		f := asm.LoadImm(asm.R2, -1, asm.DWord).WithReference(name)
		f.Src = asm.PseudoFunc
		return asm.Instructions{f, asm.Mov.Imm(asm.R3, 0), asm.Mov.Imm(asm.R4, 0), asm.FnLoop.Call(), asm.Mov.Imm(asm.R0, 0), asm.Return()}
	}
	program := append(asm.Instructions{function(asm.LoadImm(asm.R1, n, asm.DWord), "main")}, call("outer")...)
	program = append(program, function(asm.Mov.Imm(asm.R1, 4096), "outer"))
	program = append(program, call("inner")...)
	return append(program, function(asm.Mov.Imm(asm.R0, 0), "inner"), asm.Return())
}
