package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"time"

	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor/processortest"
)

// A buffer of a million traces takes 3.9 GB, and the garbage collector as much
// again.
const growthMemory = 12 << 30

// measureGrowth tells what a span costs spike_sampling, from its arrival to its
// decision, with few and with many traces in the buffer. Each is measured in processes
// of their own, in turns, twice: the first time all memory is new to the process, and
// each page of it costs the kernel time (see spare for what is left out of that); the
// second time the buffer has the memory of the first, as one that stays full does.
func measureGrowth(ctx context.Context, rep *report) error {
	const name = "processor CPU per span, scattered"
	free, err := availableMemory()
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if free < growthMemory {
		rep.LeftOut = append(rep.LeftOut, leftOut{name + ", 1e6 traces in the buffer", fmt.Sprintf("needs %d GiB of memory, %d are available", growthMemory>>30, free>>30)})
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	const few, many = 1e4, 1e6
	values := map[int][2][]float64{}
	run := func(n int) error {
		out, err := exec.CommandContext(ctx, self, "-fill", strconv.Itoa(n)).Output()
		if err != nil {
			return fmt.Errorf("%s: %d traces: %w", name, n, err)
		}
		var first, again float64
		if _, err := fmt.Sscan(string(out), &first, &again); err != nil {
			return fmt.Errorf("%s: %q: %w", name, out, err)
		}
		v := values[n]
		values[n] = [2][]float64{append(v[0], first), append(v[1], again)}
		return nil
	}
	for range 2 { // a million traces take most of a minute
		if err := errors.Join(run(few), run(few), run(few), run(many)); err != nil {
			return err
		}
	}
	for i, when := range []string{", in memory new to the process", ""} {
		rows := []row{
			{Name: name + when, Subject: "1e6 traces in the buffer", Value: median(values[many][i]), Unit: "us"},
			{Name: name + when, Subject: "1e4 traces in the buffer", Value: median(values[few][i]), Unit: "us"},
		}
		rows[0].compare(rows[1], false)
		rep.Rows = append(rep.Rows, rows...)
	}
	return nil
}

// fillTwice prints what a span costs the first and the second time that the buffer is
// filled in this process, in microseconds.
func fillTwice(ctx context.Context, n int) error {
	runtime.GOMAXPROCS(1)
	making, err := makingCost(n)
	if err != nil {
		return err
	}
	s, err := newSpare(int64(n) * growthMemory / 1.5e6)
	if err != nil {
		return err
	}
	for range 2 {
		us, err := growthRun(ctx, n, making, s)
		if err != nil {
			return err
		}
		fmt.Println(us)
	}
	return s.close()
}

// makingCost is the CPU time that it takes to make the spans of n traces where nothing
// else is in memory: the least it can be, so that all that a full buffer adds counts as
// the processor's.
func makingCost(n int) (time.Duration, error) {
	from := cpuTime()
	_, _, err := makeScattered(n, func(ptrace.Traces) error { return nil })
	return cpuTime() - from, err
}

// growthRun fills the buffer with n traces, has them decided, and returns the CPU
// time of that in microseconds a span, less that of making the spans.
func growthRun(ctx context.Context, n int, making time.Duration, s *spare) (float64, error) {
	c := contenders()[0]
	cfg := c.factory.CreateDefaultConfig()
	if err := confmap.NewFromStringMap(maps.Clone(c.config)).Unmarshal(cfg); err != nil {
		return 0, err
	}
	sink := new(consumertest.TracesSink)
	p, err := c.factory.CreateTraces(ctx, processortest.NewNopSettings(c.factory.Type()), cfg, sink)
	if err != nil {
		return 0, err
	}
	if err := p.Start(ctx, componenttest.NewNopHost()); err != nil {
		return 0, err
	}
	runtime.GC()
	took := cpuTime()
	spans, want, err := makeScattered(n, func(td ptrace.Traces) error { return errors.Join(s.follow(), p.ConsumeTraces(ctx, td)) })
	if err != nil {
		return 0, err
	}
	if err := p.Shutdown(ctx); err != nil {
		return 0, err
	}
	took = cpuTime() - took - making
	if err := checkKept(sink, want); err != nil {
		return 0, err
	}
	return float64(took) / float64(time.Microsecond) / float64(spans), nil
}

// makeScattered makes traces, n or a few more, batch by batch as makeLoad does:
// one span each of 1024 traces from each of eight services in turn. It returns
// the number of spans, and the traces that must be kept.
func makeScattered(n int, take func(ptrace.Traces) error) (made int, keep map[pcommon.TraceID]bool, err error) {
	g := newLoadMaker()
	traces := make([]loadTrace, spansPerBatch)
	for made < n*spansPerTrace {
		for i := range traces {
			traces[i] = g.newTrace()
		}
		for service := range spansPerTrace {
			td, spans := newBatch(service)
			for k := range traces {
				g.fillSpan(spans.AppendEmpty(), &traces[k], service)
			}
			made += spans.Len()
			if err := take(td); err != nil {
				return 0, nil, err
			}
		}
	}
	return made, g.keep, nil
}

// availableMemory returns the bytes that the kernel can give without swapping.
func availableMemory() (int64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	_, rest, ok := bytes.Cut(text, []byte("MemAvailable:"))
	var kib int64
	if _, err := fmt.Sscan(string(rest), &kib); err != nil || !ok {
		return 0, fmt.Errorf("/proc/meminfo has no MemAvailable: %w", err)
	}
	return kib << 10, nil
}
