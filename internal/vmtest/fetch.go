//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// kernel is one that is tested: a Debian package, from the release that the
// machine is set up with, or from another suite of the same mirror.
type kernel struct {
	name    string // as it is asked for on the command line
	version string // what its release begins with: an update may not silently become another kernel; "" for any
	pkg     string // with a * in the place of a number: of those that there are the one with the largest
	suite   string
	tests   []string // those that run there; nil for all of everywhere
	options string   // for its command line
}

// Packages of Debian 12 stay what they are but for security updates; trixie-backports moves.
var kernels = []kernel{
	{name: "5.10", version: "5.10.", pkg: "linux-image-cloud-amd64", suite: "bullseye", tests: []string{"TestAKernelBelowTheFloorIsRefused"}},
	{name: "6.1", version: "6.1.", pkg: "linux-image-cloud-amd64"},
	{name: "6.12", version: "6.12.", pkg: "linux-image-6.12-cloud-amd64"},
	{name: "6.18", version: "6.18.", pkg: "linux-image-6.18.*+deb13-cloud-amd64", suite: "trixie-backports"},
	{name: "6.12-integrity", version: "6.12.", pkg: "linux-image-6.12-cloud-amd64", options: "lockdown=integrity", tests: []string{"TestALockedDownKernel", "TestOneProbeNamesEachFault"}},
	{name: "6.12-confidentiality", version: "6.12.", pkg: "linux-image-6.12-cloud-amd64", options: "lockdown=confidentiality", tests: []string{"TestALockedDownKernel"}},
	{name: "newest", pkg: "linux-image-cloud-amd64", suite: "trixie-backports"},
}

// unpacked is a kernel package on disk.
type unpacked struct {
	kernel
	root    string // where the package was unpacked
	release string // as uname -r says
}

// fetch downloads a kernel into the cache, unless this very package lies there, and unpacks it. Nothing is installed.
func (k kernel) fetch(ctx context.Context, cache string) (unpacked, error) {
	apt, err := k.apt(ctx, cache)
	if err != nil {
		return unpacked{}, err
	}
	pkgs, err := apt.resolve(ctx, k.pkg)
	if err != nil {
		return unpacked{}, err
	}
	root := filepath.Join(cache, strings.Join(pkgs, "+"))
	if _, err := os.Stat(root); errors.Is(err, os.ErrNotExist) {
		work, err := os.MkdirTemp(cache, "unpack-")
		if err != nil {
			return unpacked{}, err
		}
		defer os.RemoveAll(work)
		if _, err := apt.run(ctx, work, "apt-get", append([]string{"download"}, pkgs...)...); err != nil {
			return unpacked{}, err
		}
		debs, err := filepath.Glob(filepath.Join(work, "*.deb"))
		if err != nil {
			return unpacked{}, err
		}
		for _, d := range debs {
			if b, err := exec.CommandContext(ctx, "dpkg", "-x", d, filepath.Join(work, "root")).CombinedOutput(); err != nil {
				return unpacked{}, fmt.Errorf("unpacking %s: %w: %s", d, err, b)
			}
		}
		if err := os.Rename(filepath.Join(work, "root"), root); err != nil {
			return unpacked{}, err
		}
	}
	u := unpacked{kernel: k, root: root}
	for _, pattern := range []string{"lib/modules/*", "usr/lib/modules/*"} {
		dirs, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return unpacked{}, err
		}
		for _, d := range dirs {
			u.release = filepath.Base(d)
		}
	}
	if u.release == "" || !strings.HasPrefix(u.release, k.version) {
		return unpacked{}, fmt.Errorf("package %s holds kernel %q, not %s*", k.pkg, u.release, k.version)
	}
	return u, nil
}

// apt is the machine's own, or one beside it for another suite: the machine's sources, lists and locks stay as they are.
type apt struct{ options []string }

func (k kernel) apt(ctx context.Context, cache string) (apt, error) {
	a := apt{options: []string{"-qq", "-o", "APT::Sandbox::User=root"}}
	if k.suite == "" {
		return a, nil
	}
	dir := filepath.Join(cache, "apt-"+k.suite)
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return a, err
		}
	}
	mirror, err := mirror()
	if err != nil {
		return a, err
	}
	list := fmt.Sprintf("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n", mirror, k.suite)
	if err := os.WriteFile(filepath.Join(dir, "sources.list"), []byte(list), 0o644); err != nil {
		return a, err
	}
	for _, o := range []string{
		"Dir::Etc::sourcelist=" + filepath.Join(dir, "sources.list"), "Dir::Etc::sourceparts=-",
		"Dir::State::Lists=" + filepath.Join(dir, "lists"), "Dir::Cache=" + filepath.Join(dir, "cache"),
		"Acquire::Languages=none",
	} {
		a.options = append(a.options, "-o", o)
	}
	_, err = a.run(ctx, dir, "apt-get", "update")
	return a, err
}

// mirror is the one that the machine takes its packages from.
func mirror() (string, error) {
	files, err := filepath.Glob("/etc/apt/sources.list.d/*.sources")
	if err != nil {
		return "", err
	}
	uri := regexp.MustCompile(`(?m)^(?:URIs:|deb(?: \[[^]]*\])?)[ \t]+(\S+)`)
	for _, f := range append(files, "/etc/apt/sources.list") {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for _, m := range uri.FindAllStringSubmatch(string(b), -1) {
			if !strings.Contains(m[1], "security") {
				return m[1], nil
			}
		}
	}
	return "", errors.New("no Debian mirror in /etc/apt: kernels come from there")
}

func (a apt) run(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, append(append([]string{}, a.options...), args...)...)
	cmd.Dir = dir
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, stderr.String())
	}
	return string(out), nil
}

// largest is the package whose name has the largest number in the place of the *.
func (a apt) largest(ctx context.Context, pkg string) (string, error) {
	before, after, ok := strings.Cut(pkg, "*")
	if !ok {
		return pkg, nil
	}
	names, err := a.run(ctx, ".", "apt-cache", "pkgnames", before)
	if err != nil {
		return "", err
	}
	best := -1
	for name := range strings.FieldsSeq(names) {
		number, ok := strings.CutSuffix(strings.TrimPrefix(name, before), after)
		if n, err := strconv.Atoi(number); ok && err == nil {
			best = max(best, n)
		}
	}
	if best < 0 {
		return "", fmt.Errorf("there is no package %s", pkg)
	}
	return before + strconv.Itoa(best) + after, nil
}

// resolve follows a metapackage to the packages with the kernel and its modules.
func (a apt) resolve(ctx context.Context, pkg string) ([]string, error) {
	depends := regexp.MustCompile(`(?m)^ *Depends: (linux-(?:image|binary|modules)-[0-9]\S*)`)
	pkg, err := a.largest(ctx, pkg)
	if err != nil {
		return nil, err
	}
	pkgs := []string{pkg}
	for range 4 { // metapackage, image, binary and modules
		out, err := a.run(ctx, ".", "apt-cache", "depends", "--important", pkgs[0])
		if err != nil {
			return nil, err
		}
		var next []string
		for _, m := range depends.FindAllStringSubmatch(out, -1) {
			next = append(next, m[1])
		}
		if len(next) == 0 {
			break
		}
		pkgs = next
		if len(pkgs) > 1 {
			break
		}
	}
	// the version is part of the name that the cache is kept by: with an update it is another kernel
	for i, p := range pkgs {
		out, err := a.run(ctx, ".", "apt-cache", "show", "--no-all-versions", p)
		if err != nil {
			return nil, err
		}
		m := regexp.MustCompile(`(?m)^Version: (\S+)`).FindStringSubmatch(out)
		if m == nil {
			return nil, fmt.Errorf("package %s has no version", p)
		}
		pkgs[i] = p + "=" + m[1]
	}
	return pkgs, nil
}
