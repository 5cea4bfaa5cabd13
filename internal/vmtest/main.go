//go:build linux

// Command vmtest runs the tests of the kernel side on other kernels: Debian's, in
// virtual machines, with the same test binary on each and nothing compiled there.
// It prints a line for each kernel, writes what it found as JSON, and exits with
// status 1 if anything failed. With -docs it makes the table of docs/kernels.md
// of what was written, and runs nothing.
//
// The machines are emulated, some twenty times slower than this one: the tests
// that run there tell which stage and how often, and not for how long.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/cserver"
)

// everywhere are the tests that run in the machines. Each must have ended there:
// one that does not run is a failure.
var everywhere = []string{
	"TestEachStageIsMeasuredByTheHookOfThisKernel",
	"TestMessages",
	"TestAFileThatIsSentByTheKernelIsTheResponse",
	"TestOneProbeNamesEachFault",
	"TestASlowReaderIsSendBuffer",
	"TestThrottlingIsToldFromTheRunQueue",
	"TestAGroupAtItsLimitIsReclaim",
	"TestTenThousandProcessesLeaveNothingBehind",
	"TestCloseLeavesNothingBehind",
}

func main() {
	names := make([]string, 0, len(kernels))
	for _, k := range kernels {
		names = append(names, k.name)
	}
	chosen := flag.String("kernels", strings.Join(names, ","), "the kernels to test on")
	run := flag.String("run", "", "regular expression: the tests to run; when empty those that are meant for it")
	out := flag.String("out", "out/kernels.json", "where to write what was found")
	verbose := flag.Bool("v", false, "print all that the tests print")
	timeout := flag.Duration("timeout", 15*time.Minute, "for one kernel")
	docs := flag.String("docs", "", "put the table of -out into this file, and run nothing")
	flag.Parse()
	if *docs != "" {
		if err := writeDocs(*docs, *out); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	if err := testAll(ctx, strings.Split(*chosen, ","), *run, *out, *verbose, *timeout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// report is what out/kernels.json holds.
type report struct {
	Kernels []outcome `json:"kernels"`
}

type outcome struct {
	kernel  kernel
	Name    string   `json:"name"`
	Release string   `json:"release"`
	Options string   `json:"options,omitempty"` // of its command line
	Passed  int      `json:"passed"`
	Failed  int      `json:"failed"`
	Skipped int      `json:"skipped"`
	Stages  []hook   `json:"stages"`
	Seconds float64  `json:"seconds"`
	failed  []string // the tests that did
	skipped []string
	ended   map[string]bool // those with a verdict
}

// hook is what a stage is measured by on a kernel.
type hook struct {
	Stage string `json:"stage"`
	Hook  string `json:"hook"`
}

func testAll(ctx context.Context, chosen []string, run, out string, verbose bool, timeout time.Duration) error {
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	cache = filepath.Join(cache, "ebpfllm", "kernels")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	for _, name := range chosen {
		if !slices.ContainsFunc(kernels, func(k kernel) bool { return k.name == name }) {
			return fmt.Errorf("no kernel %q: there are %v", name, kernels)
		}
	}
	work, err := os.MkdirTemp("", "ebpfllm-vm-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	programs := filepath.Join(work, "tests")
	if err := install(ctx, programs); err != nil {
		return err
	}
	var r report
	for _, k := range kernels {
		if slices.Contains(chosen, k.name) {
			r.Kernels = append(r.Kernels, outcome{kernel: k, Name: k.name, Options: k.options, ended: map[string]bool{}})
		}
	}
	var (
		failed = make([]error, len(r.Kernels))
		wg     sync.WaitGroup
		turn   = make(chan struct{}, runtime.NumCPU()) // each machine keeps one CPU busy
	)
	for i := range r.Kernels {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			o := &r.Kernels[i]
			tests := o.kernel.tests
			if tests == nil {
				tests = everywhere
			}
			pattern := run
			if run == "" {
				pattern = "^(" + strings.Join(tests, "|") + ")$"
			}
			err := o.test(ctx, cache, filepath.Join(work, o.Name), programs, pattern, verbose, timeout)
			for _, name := range tests {
				if err == nil && run == "" && !o.ended[name] {
					err = fmt.Errorf("%s did not run", name)
				}
			}
			if err != nil {
				failed[i] = fmt.Errorf("kernel %s: %w", o.Name, err)
				o.Failed++
			}
		})
	}
	wg.Wait()
	r.print(os.Stdout)
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(out, append(b, '\n'), 0o644); err != nil {
		return err
	}
	for _, o := range r.Kernels {
		if len(o.failed) > 0 {
			failed = append(failed, fmt.Errorf("kernel %s: failed: %s", o.Name, strings.Join(o.failed, ", ")))
		}
	}
	return errors.Join(failed...)
}

// test boots a kernel and takes what its machine says.
func (o *outcome) test(ctx context.Context, cache, work, programs, run string, verbose bool, timeout time.Duration) error {
	u, err := o.kernel.fetch(ctx, cache)
	if err != nil {
		return fmt.Errorf("fetching %s: %w", o.kernel.pkg, err)
	}
	o.Release = u.release
	img, err := u.prepare(ctx, work, programs, "-test.v", "-test.timeout="+timeout.String(), "-test.run="+run)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	begin := time.Now()
	status, err := boot(ctx, img, o.kernel.options, work, func(line string) {
		o.take(line)
		if verbose {
			fmt.Println(o.Name+":", line)
		}
	})
	o.Seconds = math.Round(time.Since(begin).Seconds())
	if err == nil && status != 0 && o.Failed == 0 {
		err = fmt.Errorf("the guest ended with status %d", status)
	}
	return err
}

var (
	verdict  = regexp.MustCompile(`^--- (PASS|FAIL|SKIP): (\S+)`)
	hookLine = regexp.MustCompile(`^hook: stage=(\S+) hook=(.+)$`)
)

// take reads a line of what the tests print.
func (o *outcome) take(line string) {
	if m := hookLine.FindStringSubmatch(line); m != nil {
		o.Stages = append(o.Stages, hook{Stage: m[1], Hook: m[2]})
	}
	m := verdict.FindStringSubmatch(line)
	if m == nil {
		return
	}
	o.ended[m[2]] = m[1] != "SKIP"
	switch m[1] {
	case "PASS":
		o.Passed++
	case "FAIL":
		o.Failed++
		o.failed = append(o.failed, m[2])
	case "SKIP":
		o.Skipped++
		o.skipped = append(o.skipped, m[2])
	}
}

// print ends with the line by which a script may tell.
func (r report) print(to io.Writer) {
	w := tabwriter.NewWriter(to, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "kernel\trelease\tpassed\tfailed\tskipped\tseconds")
	passed, failed := 0, 0
	for _, o := range r.Kernels {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%.0f\n", o.Name, o.Release, o.Passed, o.Failed, o.Skipped, o.Seconds)
		passed += o.Passed
		failed += o.Failed
	}
	_ = w.Flush()
	for _, o := range r.Kernels {
		if len(o.skipped) > 0 {
			fmt.Fprintf(to, "%s: skipped: %s\n", o.Name, strings.Join(o.skipped, ", "))
		}
	}
	fmt.Fprintf(to, "%d passed, %d failed\n", passed, failed)
}

// install builds the tests and what they run, with no library that a machine would have to have.
func install(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	const pkg = "./internal/kerneltest"
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-o", filepath.Join(dir, "kerneltest.test"), pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building the tests of %s: %w: %s", pkg, err, b)
	}
	return cserver.Build(filepath.Join(dir, "server"), "-static")
}

func build(ctx context.Context, pkg, to string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-o", to, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w: %s", pkg, err, b)
	}
	return nil
}
