//go:build linux

// Command vmtest runs the tests of the kernel side on other kernels: Debian's, in
// virtual machines, with the same test binary on each and nothing compiled there.
// It prints a line for each kernel, writes what it found as JSON, and exits with
// status 1 if anything failed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/cserver"
)

func main() {
	names := make([]string, 0, len(kernels))
	for _, k := range kernels {
		names = append(names, k.name)
	}
	chosen := flag.String("kernels", strings.Join(names, ","), "the kernels to test on")
	run := flag.String("run", "", "regular expression: the tests to run; all when empty")
	out := flag.String("out", "out/kernels.json", "where to write what was found")
	verbose := flag.Bool("v", false, "print all that the tests print")
	timeout := flag.Duration("timeout", 15*time.Minute, "for one kernel")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
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
	Name    string   `json:"name"`
	Release string   `json:"release"`
	Passed  int      `json:"passed"`
	Failed  int      `json:"failed"`
	Skipped int      `json:"skipped"`
	Stages  []hook   `json:"stages"`
	Seconds float64  `json:"seconds"`
	failed  []string // the tests that did
	skipped []string // and why others did not run
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
	pkg := os.Getenv("V4PKG")
	if pkg == "" {
		pkg = "./internal/kerneltest"
	}
	programs := []program{{pkg: pkg, args: []string{"-test.v", "-test.timeout=" + timeout.String()}}}
	if run != "" {
		programs[0].args = append(programs[0].args, "-test.run="+run)
	}
	var r report
	var failed error
	for _, k := range kernels {
		if !slices.Contains(chosen, k.name) {
			continue
		}
		o, err := test(ctx, k, cache, programs, verbose, timeout)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("kernel %s: %w", k.name, err))
			o.Failed++
		}
		r.Kernels = append(r.Kernels, o)
	}
	r.print(os.Stdout)
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return errors.Join(failed, os.WriteFile(out, append(b, '\n'), 0o644))
}

func test(ctx context.Context, k kernel, cache string, programs []program, verbose bool, timeout time.Duration) (outcome, error) {
	o := outcome{Name: k.name}
	u, err := k.fetch(ctx, cache)
	if err != nil {
		return o, fmt.Errorf("fetching %s: %w", k.pkg, err)
	}
	o.Release = u.release
	work, err := os.MkdirTemp("", "ebpfllm-vm-")
	if err != nil {
		return o, err
	}
	defer os.RemoveAll(work)
	img, err := u.prepare(ctx, work, programs)
	if err != nil {
		return o, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	begin := time.Now()
	status, err := boot(ctx, img, work, func(line string) {
		o.take(line)
		if verbose {
			fmt.Println(line)
		}
	})
	o.Seconds = time.Since(begin).Seconds()
	if err == nil && status != 0 && o.Failed == 0 {
		err = fmt.Errorf("the guest ended with status %d", status)
	}
	return o, err
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
		if len(o.failed) > 0 {
			fmt.Fprintf(to, "%s: failed: %s\n", o.Name, strings.Join(o.failed, ", "))
		}
		if len(o.skipped) > 0 {
			fmt.Fprintf(to, "%s: skipped: %s\n", o.Name, strings.Join(o.skipped, ", "))
		}
	}
	fmt.Fprintf(to, "%d passed, %d failed\n", passed, failed)
}

// program is a test binary.
type program struct {
	pkg  string
	args []string
}

// install builds it, without C so that it needs no library, and what it runs.
func (p program) install(dir string) error {
	name := filepath.Base(p.pkg)
	cmd := exec.Command("go", "test", "-c", "-o", filepath.Join(dir, name+".test"), p.pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building the tests of %s: %w: %s", p.pkg, err, b)
	}
	if err := cserver.Build(filepath.Join(dir, "server"), "-static"); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".args"), []byte(strings.Join(p.args, " ")), 0o644)
}

func build(ctx context.Context, pkg, to string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-o", to, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w: %s", pkg, err, b)
	}
	return nil
}
