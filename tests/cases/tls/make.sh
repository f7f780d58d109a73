#!/bin/sh
# Makes the certificates of the tests, for a century: two authorities, and certificates of them, one of which has expired.
set -e
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
touch "$work/index"
cat > "$work/openssl.cnf" <<END
[ca]
default_ca = tests
[tests]
new_certs_dir = $work
database = $work/index
rand_serial = yes
default_md = sha256
unique_subject = no
policy = policy
x509_extensions = rank
[policy]
commonName = supplied
[authority]
basicConstraints = critical, CA:true
[rank]
basicConstraints = CA:false
END
make() { # a name, when it ends, and how it is signed
    name=$1 end=$2
    shift 2
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$name.key"
    openssl req -new -key "$name.key" -subj "/CN=ringcomm tests: $name" -out "$work/request"
    openssl ca -config "$work/openssl.cnf" -batch -notext -startdate 20200101000000Z -enddate "$end" "$@" \
        -in "$work/request" -out "$name.pem"
}
FAR=21200101000000Z
make authority $FAR -selfsign -keyfile authority.key -extensions authority
make another $FAR -selfsign -keyfile another.key -extensions authority
make rank $FAR -cert authority.pem -keyfile authority.key
make expired 20210101000000Z -cert authority.pem -keyfile authority.key
make stranger $FAR -cert another.pem -keyfile another.key
rm authority.key
